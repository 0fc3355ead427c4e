#!/bin/sh
# Builds the image ans:VERSION of this checkout: `docker/build.sh [OPTIONS OF THE BUILD]`. Docker builds it where its daemon answers; elsewhere
# buildah does, as root, over a base made of Debian's packages (apt-get install buildah debootstrap).
# Where pip asks another index than PyPI: `--secret id=pip,src=PIP.CONF`; folders that its settings name: `--volume /wheels:/wheels:ro` (buildah).
set -eu
cd "$(dirname "$0")/.."
image=ans:$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
set -- --label "org.opencontainers.image.revision=$(git describe --always --abbrev=40 --dirty 2>/dev/null || true)" "$@"

if docker info >/dev/null 2>&1; then
    exec docker build --tag "$image" --file docker/Dockerfile "$@" .
fi

command -v buildah debootstrap >/dev/null || { echo "neither Docker's daemon nor buildah and debootstrap are here: apt-get install buildah debootstrap" >&2; exit 2; }
export BUILDAH_ISOLATION=chroot  # needs neither systemd nor a network of its own
base=localhost/ans-base:bookworm
if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    container=$(buildah from scratch)
    trap 'buildah rm "$container" >/dev/null' EXIT
    debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,ca-certificates bookworm "$(buildah mount "$container")"
    buildah commit --quiet "$container" "$base"
    buildah rm "$container" >/dev/null
    trap - EXIT
fi
exec buildah bud --layers --pull-never --format docker --tag "$image" --file docker/Dockerfile --build-arg "BASE=$base" "$@" .
