"""WordNet 3.0's dictionary files -> ans_core/metrics/data/synonyms.txt.xz, the one-word synonyms that METEOR
needs.

The files come from Debian (no root needed); in an empty folder:
    apt-get download wordnet-base wordnet-sense-index && for deb in *.deb; do dpkg -x $deb .; done
    mkdir -p nltk_data/corpora/wordnet && cp usr/share/wordnet/* nltk_data/corpora/wordnet/
    zcat usr/share/man/man5/lexnames.5*.gz | grep -E '^[0-9]{2}' | awk '{split($2,a,"."); p["noun"]=1; p["verb"]=2; p["adj"]=3;
    p["adv"]=4;
        print $1 "\t" $2 "\t" p[a[1]]}' > nltk_data/corpora/wordnet/lexnames
Then: NLTK_DATA=$PWD/nltk_data python perf/build_synonyms.py

One line per word and part of speech (n v a r): `word<TAB>n<TAB>its lemma names`, and one per irregular form:
`word<TAB>n!<TAB>base forms`. Left out, because no lower-cased one-word text can meet them: entries of several
words and synonyms with capitals.
"""

from __future__ import annotations

import lzma
from pathlib import Path

from nltk.corpus import wordnet
from nltk.corpus.reader.wordnet import Synset

OUT = Path(__file__).parents[1] / "ans_core" / "metrics" / "data" / "synonyms.txt.xz"


def lines() -> list[str]:
    wordnet.ensure_loaded()
    irregular = [
        (form, pos, bases)
        for pos in "nvar"
        for form, bases in wordnet._exception_map[pos].items()
        if "_" not in form
    ]
    # `comics` leads to `comic_strip`, whose synonyms are single words
    wanted = {base for _, _, bases in irregular for base in bases}
    rows: dict[tuple[str, str], set[str]] = {}
    for pos in "nvar":
        for word in wordnet.all_lemma_names(pos):
            if "_" in word and word not in wanted:
                continue
            names = {
                name
                for synset in wordnet.synsets(word, pos, check_exceptions=False)
                for name in _names(synset, word, pos)
            }
            rows[word, pos] = names
    text = [f"{word}\t{pos}\t{' '.join(sorted(names))}" for (word, pos), names in rows.items()]
    text += [
        f"{form}\t{pos}!\t{' '.join(base for base in bases if (base, pos) in rows)}"
        for form, pos, bases in irregular
    ]
    return sorted(text)


def _names(synset: Synset, word: str, pos: str) -> list[str]:
    """Of the synsets that `word` itself (not a form derived from it) belongs to."""
    if synset.offset() not in wordnet._lemma_pos_offset_map[word].get(pos, []):
        return []
    return [name for name in synset.lemma_names() if "_" not in name and name == name.lower()]


if __name__ == "__main__":
    table = lines()
    OUT.write_bytes(lzma.compress("\n".join(table).encode() + b"\n", preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(table)} lines, {OUT.stat().st_size} bytes: {OUT}")
