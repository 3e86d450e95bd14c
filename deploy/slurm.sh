#!/usr/bin/env bash
# sbatch deploy/slurm.sh /models/Qwen3-4B /shared/runs/support
#
# The first node runs log, gateway, vLLM, judge and store; the trainer runs on all other nodes, a process for each GPU. Model, run
# directory and this checkout with .venv (deploy/make-venv.sh gpu) lie in a file system that all nodes see, with locks between nodes.
# Agents call the first node: http://<node>:8700, with the key in <run directory>/operator.key. A job that starts again with the
# same run directory goes on.
#SBATCH --job-name=journeywork
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail
umask 077
base=${1:?the folder of the base model} run=${2:?the run directory, in a shared file system}
bin=${SLURM_SUBMIT_DIR:?start it with sbatch}/.venv/bin
gpus=${SLURM_GPUS_ON_NODE:-1}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
trainers=$((${#nodes[@]} - 1))
((trainers > 0)) || { echo "slurm.sh: ask for two nodes or more (--nodes); on one node run journeywork up" >&2; exit 2; }
mkdir -p "$run/keys" "$run/log"

# The gateway listens on an address that others reach, so it wants a key.
[ -s "$run/operator.key" ] || printf 'jw-%s' "$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')" > "$run/operator.key"
digest=$(sha256sum < "$run/operator.key" | cut -d ' ' -f 1)

# The log has a run directory of its own, since `up` wants its alone.
cat > "$run/log.toml" <<TOML
run_dir = "$run/log"
[nats]
users = "$run/keys"
TOML
cat > "$run/journeywork.toml" <<TOML
run_dir = "$run/run"
[nats]
url = "nats://$head:4222"
users = "$run/keys"
provision = false
[vllm]
device = "cuda"
max_lora_rank = 16
[[models]]
name = "support"
base = "$base"
[gateway]
host = "0.0.0.0"
port = 8700
# As many as the trainer trains before the newest is stale: `up` computes it only where it starts the trainer.
max_groups_ahead = 24
[[gateway.keys]]
name = "operator"
role = "operator"
sha256 = "$digest"
[trainer]
engine = "transformers"
processes = $((trainers * gpus))
[trainer.lora]
rank = 16
TOML

on_head=(srun --overlap --nodes=1 --ntasks=1 "--nodelist=$head")
trap 'kill -TERM $(jobs -p) 2> /dev/null; wait' EXIT
trap 'exit 143' TERM
"${on_head[@]}" --gpus=0 "$bin/journeywork" exec nats --config "$run/log.toml" --port 4222 &
"${on_head[@]}" --gpus=0 "$bin/journeywork" provision --config "$run/journeywork.toml"
"${on_head[@]}" "$bin/journeywork" up --config "$run/journeywork.toml" --services gateway,sampler,judge,store,ui &
# `up` writes the settings of all services, with the address of vLLM and the keys.
until curl -fs -o /dev/null "http://$head:8700/health"; do
  sleep 2
  [ "$(jobs -rp | wc -l)" -eq 2 ] || { echo "slurm.sh: a service ended before it was ready; see $run/run/logs" >&2; exit 1; }
done
srun --overlap --nodes="$trainers" --ntasks="$trainers" --ntasks-per-node=1 --exclude="$head" \
  "$bin/python" -m torch.distributed.run --nnodes "$trainers" --nproc-per-node "$gpus" --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-endpoint "${nodes[1]}:29400" -m trainer --config "$run/run/config.toml" &
# If one part ends, the job ends, and Slurm starts it again where --requeue allows.
wait -n || true
exit 1
