#!/bin/sh
# A worker of the pool named first, with the deployments of the file named second: `worker.sh ans prefect.yaml`.
set -eu
export ANS_POOL="$1" ANS_SUFFIX=""
dvc remote add --local --force --default minio s3://dvc
dvc remote modify --local minio endpointurl http://minio:9000
prefect work-pool create "$1" --type process --overwrite
prefect --no-prompt deploy --all --prefect-file "$2"
python docker/lost_runs.py "$1"
exec prefect worker start --pool "$1" --limit 1 --with-healthcheck
