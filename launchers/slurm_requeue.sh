#!/usr/bin/env bash
# Slurm job of one run on one node that goes on after a time limit, a preemption or the loss of the node:
#   sbatch [--gpus=N ...] launchers/slurm_requeue.sh async_ppo trial_name=big total_train_steps=10000
# Every start is the same command, which goes on from the newest checkpoint; so `fileroot` lies on a file system that all
# nodes see. 180 s before the limit, and when preempted, the run is asked to stop: it finishes its step and saves.
#SBATCH --job-name=asyncrl
#SBATCH --nodes=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@180
#SBATCH --output=asyncrl-%j.log
set -uo pipefail

pass_on() {
    while cmp -s "/proc/$launcher/comm" /proc/$$/comm; do sleep 0.1; done # still bash's copy of itself, which swallows it
    kill -TERM "$launcher" 2>/dev/null
}
signals= launcher= early=
trap 'signals+=x; if [ -n "$launcher" ]; then pass_on; else early=x; fi' TERM INT
"${ASYNCRL_PYTHON:-python3}" -m asyncrl.launch "$@" logging.display=plain &
launcher=$!
[ -z "$early" ] || pass_on # a signal that came before there was anybody to pass it on to

while # a signal that comes meanwhile may have ended the wait, and not the launcher; bash remembers how that one ended
    before=$signals
    wait "$launcher" && code=0 || code=$?
    [ "$signals" != "$before" ]
do :; done

# 0: complete. 2: a setting is wrong. 1: it failed, beyond what it starts again by itself. None is mended by a requeue.
if [ -n "$signals" ] && [ "$code" != 0 ] && [ "$code" != 2 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
