"""`ans push` and `ans pull`: a checkpoint folder to a repository on the Hugging Face hub with a model card,
and from there to a folder."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from ans_core.checkpoints import checkpoint as checkpoints
from ans_core.checkpoints import conversion, folder
from ans_core.hub import download as hub
from ans_core.hub.catalogue import Published
from ans_core.hub.fetch import confirmed, fetch_orders, order
from ans_core.hub.model_card import EXAMPLES, README, Card, card

SENT = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*", "NOTICE*")
"""Files of a checkpoint folder that belong to the model."""
SHOWN = re.compile(rf"!\[(?:right|wrong)\]\(({EXAMPLES}/[^/)]+)\)")
"""An example on a card, with the path of its picture."""


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """What a push sends: contents by their path in the repository, the card among them."""

    repo: str
    layout: str
    contents: dict[str, Path | bytes]
    card: Card
    left_out: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(size_of(content) for content in self.contents.values())


def size_of(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def parcel(source: Path, repo: str, *, run: Path | None, licence: str | None) -> Parcel:
    """Put together what goes to the repository, without asking the hub. Raises ValueError for a name that is
    no repository's, a folder that is no whole Sa2VA, a damaged file, and a licence that nothing states."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no repository: write OWNER/NAME ({error})") from error
    folder.verify(source)
    account = conversion.account(source)
    if account.problems:
        raise ValueError(f"{source} is not sent, since it could not be loaded: {'; '.join(account.problems)}")
    if account.kind not in ("native", "upstream", "sa2va-i"):
        raise ValueError(
            f"{source} is a base ({account.kind}), not a Sa2VA; push a folder that `ans convert` or the "
            "stage convert wrote"
        )
    written = card(source, repo, run=run, licence=licence, upstream=account.kind != "native")
    there = sorted(path for path in source.iterdir() if path.name != README and not path.name.startswith("."))
    sent = [
        path
        for path in there
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in SENT)
    ]
    contents: dict[str, Path | bytes] = {
        README: written.text.encode(),
        **{path.name: path for path in sent},
        **written.pictures,
    }
    if (manifest := manifest_of(source, {path.name for path in sent})) is not None:
        contents[folder.MANIFEST] = manifest
    return Parcel(
        repo=repo,
        layout=account.kind,
        contents=contents,
        card=written,
        left_out=tuple(path.name for path in there if path not in sent),
    )


def manifest_of(source: Path, names: Collection[str]) -> bytes | None:
    """Return the folder's manifest with the sums of these files alone; None if it has none of ours."""
    manifest = folder.read_manifest(source)
    if manifest is None:
        return None
    sums = {name: value for name, value in manifest["sha256"].items() if name in names}
    return (json.dumps(manifest | {"sha256": sums}, indent=1) + "\n").encode()


def shown(sent: Parcel) -> list[str]:
    """Return what goes: files with sizes, what is left out and what the card lacks."""
    width = max(map(len, sent.contents))
    lines = [
        f"{sent.repo}: {len(sent.contents)} files, {sent.size / 1e6:.2f} MB, layout {sent.layout}, licence "
        f"{sent.card.licence}"
    ]
    lines += [f"  {name:<{width}}  {size_of(content):>14,} bytes" for name, content in sent.contents.items()]
    lines += [f"  left out: {', '.join(sent.left_out)}"] if sent.left_out else []
    return [*lines, *(f"  the card lacks {what}" for what in sent.card.lacking)]


def push(
    source: Path, repo: str, *, run: Path | None, licence: str | None, public: bool, dry_run: bool, yes: bool
) -> int:
    """Show what goes, ask, and send it as one commit. What the hub has already is not sent again."""
    sent = parcel(source, repo, run=run, licence=licence)
    print("\n".join(shown(sent)))
    if dry_run:
        print(f"\n{README}:\n\n{sent.card.text}\nnothing sent: --dry-run")
        return 0
    there, stale = on_the_hub(repo, sent)
    print(
        "\n".join(
            [
                there or f"{repo} is made, {'public' if public else 'private'}",
                *(f"  removed: {name}" for name in stale),
            ]
        )
    )
    if not (yes or confirmed(sent.size, verb="send", past="sent")):
        print("nothing sent")
        return 1
    print(f"sent: {send(sent, stale, public=public)}")
    print(f"others get it by `ans pull {repo} FOLDER` or Sa2VA.from_pretrained({repo!r})")
    return 0


def on_the_hub(repo: str, sent: Parcel) -> tuple[str, list[str]]:
    """Return (a sentence on the repository, or "" if it is to be made; the files of an earlier push that go:
    weights beside the card, which a loader would read as well, and the examples on its card)."""
    with hub.explained(repo, "model"):
        try:
            info = HfApi().repo_info(repo)
        except RepositoryNotFoundError:
            return "", []
        names = [
            entry.path
            for entry in HfApi().list_repo_tree(repo, recursive=True)
            if isinstance(entry, RepoFile)
        ]
        old_card = hf_hub_download(repo, README, revision=info.sha) if README in names else None
    replaced = {
        name
        for name in names
        if name == folder.WEIGHTS_INDEX or ("/" not in name and name.endswith(".safetensors"))
    }
    if old_card is not None:
        replaced |= {*names} & {*SHOWN.findall(Path(old_card).read_text(encoding="utf-8"))}
    stale = sorted(replaced - sent.contents.keys())
    return f"{repo} is there, {'private' if info.private else 'public'}, and gets a new commit", stale


def send(sent: Parcel, stale: Sequence[str], *, public: bool) -> str:
    """Send the files as one commit and return its address."""
    added = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in sent.contents.items()
    ]
    with hub.explained(sent.repo, "model"):
        api = HfApi()
        api.create_repo(sent.repo, private=not public, exist_ok=True)
        try:
            commit = api.create_commit(
                sent.repo,
                [*added, *(CommitOperationDelete(path_in_repo=name) for name in stale)],
                commit_message="ans push",
            )
        except RuntimeError as error:  # of the library's threads that send large files
            raise hub.HubError(
                f"{sent.repo}: {error} ({error.__cause__}); the same command goes on from there"
            ) from error
    return str(commit.commit_url)


def pull(repo: str, target: Path, *, yes: bool) -> int:
    """Fetch a model repository into a folder, compare checksums and look whether it is a Sa2VA. Files of an
    earlier pull that the repository no longer has are removed."""
    published = Published(repo=repo, into=str(target.resolve()))
    wanted = order(repo, {repo: published}, root=target, into=None)
    if status := fetch_orders([wanted], yes=yes):
        return status
    for name in hub.remove_stale(wanted.repo, wanted.folder):
        print(f"removed: {name}, which an earlier pull fetched and {repo} no longer has")
    checkpoints.read_config(target)
    folder.verify(target)
    account = conversion.account(target)
    print(
        f"{account.kind}: {account.tensors} tensors, {account.parameters:,} parameters, "
        f"{', '.join(account.dtypes)}"
    )
    print(
        "\n".join(account.problems)
        or f'checksums compared, every tensor is known. Next: ans predict PICTURE "..." --model {target}'
    )
    return bool(account.problems)
