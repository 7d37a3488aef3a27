#!/usr/bin/env bash
# Slurm job of one run on one node that goes on after a time limit, a preemption or the loss of the node:
#   sbatch [--gpus=N ...] launchers/slurm_requeue.sh async_ppo trial_name=big total_train_steps=10000
# Every start is the same command, which continues from the newest checkpoint; so `fileroot` is on a file system that all
# nodes see. 180 s before the time limit Slurm sends USR1: the run finishes its step, saves, and the job is requeued.
# After a preemption (PreemptMode=REQUEUE) and the loss of a node Slurm requeues the job itself.
# `scancel JOB` ends the run: it has Slurm's KillWait (30 s by default) to finish its step and save. `scancel --batch
# --signal=TERM JOB` gives it as long as it needs.
#SBATCH --job-name=asyncrl
#SBATCH --nodes=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
#SBATCH --output=asyncrl-%j.log
set -uo pipefail

held_limit_s=600 # a node that Slurm lost may still run the job's former start
signals= launcher= requeue=
pass_on() {
    while cmp -s "/proc/$launcher/comm" /proc/$$/comm; do sleep 0.1; done # still bash's copy of itself, which swallows it
    kill -TERM "$launcher" 2>/dev/null
}
stop() {
    signals+=x
    [ -z "$launcher" ] || pass_on
}
trap 'requeue=x; stop' USR1
trap 'requeue=; stop' TERM INT # scancel sends TERM to the launcher too, which takes several as one

run() {
    "${ASYNCRL_PYTHON:-python3}" -m asyncrl.launch "$@" logging.display=plain &
    launcher=$!
    [ -z "$signals" ] || pass_on # a signal that came before there was anybody to pass it on to
    while # a signal that comes meanwhile may have ended the wait, and not the launcher; bash remembers how that one ended
        before=$signals
        wait "$launcher" && code=0 || code=$?
        [ "$signals" != "$before" ]
    do :; done
    launcher=
}

# 0: complete. 1: it failed, beyond what it starts again by itself. 2: a setting is wrong. 4: another run holds the trial.
while run "$@" && [ "$code" = 4 ] && [ -z "$signals" ] && [ "$SECONDS" -lt "$held_limit_s" ]; do
    sleep "${ASYNCRL_RETRY_S:-15}" &
    wait $!
    [ -z "$signals" ] || break
done
if [ -n "$requeue" ] && [ "$code" != 0 ] && [ "$code" != 2 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
