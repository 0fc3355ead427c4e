import re
import xml.etree.ElementTree as ElementTree

import pytest

from ans_core.report import charts


@pytest.mark.slow
def test_charts_are_whole_svgs_in_the_pages_colour_with_ids_of_their_own():
    made = [
        charts.lines("loss", {"text": [(0.0, 1.0), (10.0, 0.5)], "mask": [(0.0, 2.0)]}),
        charts.lines("long", {"loss": [(float(step), 1 / (step + 1)) for step in range(200)]}),
        charts.band("reward", [[0.1, 0.2], [0.3]]),
        charts.histogram("rewards", {"first": [0.1, 0.9], "last": [1.0]}),
    ]
    clips = []
    for svg in made:
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "currentColor" in svg
        assert charts.INK not in svg
        clips.append(set(re.findall(r'<clipPath id="(\w+)"', svg)))
    assert sum(map(len, clips)) == len(set.union(*clips)) == len(made)


def test_a_running_mean_of_a_constant_is_the_constant_and_short_curves_stay_raw():
    assert charts._running_mean(charts.np.full(300, 0.25)).tolist() == [0.25] * 300
    short = charts.np.array([1.0, 5.0])
    assert charts._running_mean(short) is short
