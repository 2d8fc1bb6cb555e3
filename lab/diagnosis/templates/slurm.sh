#!/bin/bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ cluster.nodes }}
#SBATCH --ntasks-per-node={{ tasks_per_node }}
#SBATCH --cpus-per-task={{ cluster.cpus_per_worker }}
{% if cluster.gpus %}
#SBATCH --gpus-per-node={{ cluster.gpus }}
{% endif %}
#SBATCH --time={{ cluster.time }}
#SBATCH --output={{ name }}-%j.log
#SBATCH --signal=B:TERM@{{ grace_s }}
#SBATCH --requeue
{% for option in cluster.options %}
#SBATCH {{ option }}
{% endfor %}

set -euo pipefail
cd {{ folder | quote }}
{% for command in cluster.setup %}
{{ command }}
{% endfor %}
python={{ python | quote }}
export PYTHONPATH={{ packages | quote }}${PYTHONPATH:+:$PYTHONPATH}
secret() { "$python" -c "import secrets; print(secrets.token_hex(16))"; }
{{ token_variable }}=$(secret)
{{ address_variable }}=$(hostname):{{ cluster.port }}
{{ wait_variable }}={{ wait_s }}
{{ drain_variable }}={{ drain_s }}
export {{ token_variable }} {{ address_variable }} {{ wait_variable }} {{ drain_variable }}
{% if learner.launch == "external" %}
{{ learner_token }}=$(secret)
{{ learner_address }}=$(hostname):{{ learner.address.rpartition(":")[2] }}
export {{ learner_token }} {{ learner_address }}
{% endif %}

# the controller, which resumes where an earlier start of this job ended, also on another machine
export {{ job_variable }}="slurm-${SLURM_CLUSTER_NAME:-}-${SLURM_JOB_ID:-$$}"
resume=()
if [ -f {{ config_file | quote }} ]; then
    resume=(--resume)
fi
"$python" {{ train }} "${resume[@]}" &
controller=$!
trap 'kill -TERM "$controller"' TERM INT

# rollout workers; one that ends before the run is over is started again,
# but not after bad input
# shellcheck disable=SC2016
srun --overlap --nodes={{ cluster.nodes }} --ntasks={{ cluster.workers }} --cpus-per-task={{ cluster.cpus_per_worker }} --kill-on-bad-exit=0 \
    bash -c 'until "$0" {{ worker }}; do [ $? != {{ bad_input }} ] || exit; sleep 5; done' "$python" &
workers=$!
{% if learner.launch == "external" %}

# ranks of the learner, on the cores of the workers
srun --overlap --overcommit --nodes={{ cluster.nodes }} --ntasks={{ learner.num_ranks }} --gpu-bind=none "$python" {{ rank }} &
ranks=$!
{% endif %}

# a signal interrupts `wait`: the controller saves first
while :; do
    status=0; wait "$controller" || status=$?
    kill -0 "$controller" 2>/dev/null || break
done
kill "$workers"{% if learner.launch == "external" %} "$ranks"{% endif %} 2>/dev/null || true
exit "$status"
