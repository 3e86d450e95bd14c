"""Names of ART that Journeywork does not provide. They can be imported; their use raises an error that says what to do
instead, so a program that imports what it does not reach runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Never

from journeywork.art.errors import UnsupportedError

PACKAGE = "journeywork.art"
_INTERNAL = "it is a part of ART's own trainer and server; here the installation trains and serves, as its settings say"
_COSTS = "put costs into `trajectory.metrics`; the view `verdicts` holds the judge's"
_TYPES = "import the types from journeywork.art.dev"
_HISTORY = "query the history with `journeywork sql`, or read trajectories/<split>/<step>.jsonl of the model's folder"
_FIGURES = "load_trajectories of journeywork.art.utils.benchmarking returns a table: aggregate and draw it"
_DEPLOY = "write the adapter with `journeywork export`, and deploy that folder with the provider's own tool"
_BUCKET = "set store.dir to a bucket, and write an adapter with `journeywork export`"
_CAPTURE = "use auto_trajectory and capture_auto_trajectory of journeywork.art"
_RETENTION = (
    "set trainer.keep_checkpoints: the trainer keeps the newest versions and the best, and the lake every one"
)
_TUNING = "use train_sft_from_file of journeywork.art.utils.sft, which reads the file itself"
REFUSED: dict[str, str] = {
    "api_costs": "use track_api_cost, which reads the answers' usage and litellm's prices",
    "auto_trajectory.AutoTrajectoryContext": _CAPTURE,
    "auto_trajectory.auto_trajectory_context_var": _CAPTURE,
    "auto_trajectory.parse_sse_to_chat_completion": "use consume_chat_completion_stream of journeywork.art.openai",
    "auto_trajectory.patch_httpx": _CAPTURE,
    "cli": "use the command `journeywork`",
    "conf": "set the environment variable PYTORCH_CUDA_ALLOC_CONF of the installation",
    "costs": _COSTS,
    "dev.engine": _TYPES,
    "dev.get_model_config": _INTERNAL,
    "dev.is_dedicated_mode": _INTERNAL,
    "dev.model": _TYPES,
    "dev.openai_server": _TYPES,
    "dev.train": _TYPES,
    "dev.validate": _INTERNAL,
    "dev.validate_dedicated_config": _INTERNAL,
    "langgraph.llm_wrapper.CURRENT_CONFIG": "use wrap_rollout and init_chat_model of journeywork.art.langgraph",
    "langgraph.llm_wrapper.LoggingLLM": "use init_chat_model of journeywork.art.langgraph",
    "langgraph.llm_wrapper.add_thread": "use wrap_rollout of journeywork.art.langgraph",
    "langgraph.llm_wrapper.create_messages_from_logs": "use wrap_rollout of journeywork.art.langgraph",
    "langgraph.llm_wrapper.mappings": "use wrap_rollout of journeywork.art.langgraph",
    "langgraph.logging": "use wrap_rollout of journeywork.art.langgraph, which records the calls",
    "langgraph.message_utils": "use convert_to_openai_messages of langchain_core.messages",
    "local.adapter_leases": "name a version in the call by model.get_inference_name(step): it stays loaded meanwhile",
    "local.checkpoints": "set trainer.keep_checkpoints: the trainer deletes older checkpoints by itself",
    "local.service": _INTERNAL,
    "loss": _INTERNAL,
    "megatron": _INTERNAL,
    "metrics.is_builder_managed_metric": _COSTS,
    "metrics.is_cumulative_metric_key": _COSTS,
    "metrics.to_cumulative_metric_key": _COSTS,
    "metrics_taxonomy": _COSTS,
    "model.METRIC_SECTIONS": _COSTS,
    "model.METRIC_SPLITS": _COSTS,
    "openai.init_chat_completion": "use consume_chat_completion_stream",
    "openai.update_chat_completion": "use consume_chat_completion_stream",
    "pipeline_trainer.CHECKPOINT_CREATED_AT_METRIC": _RETENTION,
    "pipeline_trainer.CHECKPOINT_EVAL_COMPLETED_METRIC": _RETENTION,
    "pipeline_trainer.CHECKPOINT_SAVED_METRIC": _RETENTION,
    "pipeline_trainer.CheckpointInfo": _RETENTION,
    "pipeline_trainer.CheckpointRetentionContext": _RETENTION,
    "pipeline_trainer.CheckpointRetentionStrategy": _RETENTION,
    "pipeline_trainer.StatusReporter": "read the rows that model.log writes, or the dashboard",
    "pipeline_trainer.binary_prefix_tool_pipeline": _INTERNAL,
    "pipeline_trainer.checkpoint_retention": _RETENTION,
    "pipeline_trainer.keep_recent_and_top": _RETENTION,
    "pipeline_trainer.state": _INTERNAL,
    "pipeline_trainer.status": _HISTORY,
    "pipeline_trainer.types": "import the types from journeywork.art.pipeline_trainer",
    "pipeline_trainer.yes_no_maybe_pipeline": _INTERNAL,
    "preprocessing": _INTERNAL,
    "serverless.client": "use ServerlessBackend(base_url=..., api_key=...)",
    "test": "it is ART's own tests",
    "tinker": _INTERNAL,
    "tinker_native": _INTERNAL,
    "transformers": _INTERNAL,
    "unsloth": _INTERNAL,
    "utils.benchmark_rollout": "use gather_trajectories, and take the mean of the rewards",
    "utils.benchmarking.aggregate_trajectories": _FIGURES,
    "utils.benchmarking.charts": _FIGURES,
    "utils.benchmarking.load_trajectories.cache_path": "load_trajectories reads the files and keeps no cache",
    "utils.benchmarking.log_constant_metrics_wandb": "log the values with wandb, once for each step",
    "utils.benchmarking.pull_model_trajectories": "use _experimental_pull_from_s3 of LocalBackend",
    "utils.convert_moe_lora": _INTERNAL,
    "utils.deploy_model": _DEPLOY,
    "utils.deployment": _DEPLOY,
    "utils.get_model_step.get_step_from_dir": "use get_model_step of journeywork.art.utils",
    "utils.group_aggregate": "use polars or `journeywork sql`",
    "utils.lifecycle": _INTERNAL,
    "utils.managed_process": _INTERNAL,
    "utils.model_config": _INTERNAL,
    "utils.network": "bind a socket to port 0",
    "utils.old_benchmarking": _HISTORY,
    "utils.record_provenance": "no artifacts of Weights & Biases are made; put it into `trajectory.metadata`",
    "utils.s3": _BUCKET,
    "utils.s3_checkpoint_utils": _BUCKET,
    "utils.sft.get_file_row_count": _TUNING,
    "utils.sft.iterate_file": _TUNING,
    "utils.sft.resolve_sft_batch_size": _TUNING,
    "utils.suppress_litellm_serialization_warnings": "use warnings.filterwarnings",
    "utils.trajectory_logging": _HISTORY,
    "utils.trajectory_migration": "use Trajectory.model_dump_json and Trajectory.model_validate_json",
    "vllm_runtime": _INTERNAL,
    "weight_transfer": _INTERNAL,
    "yield_trajectory.YieldTrajectoryContext": "use yield_trajectory and capture_yielded_trajectory",
    "yield_trajectory.yield_trajectory_context_var": "use yield_trajectory and capture_yielded_trajectory",
}
"""What to do instead, by the dotted name below `art`. A module's entry holds for all of its names."""
METHODS: dict[str, str] = {
    "_experimental_fork_checkpoint": "set models.0.start of the installation to the version",
    "_experimental_pull_from_s3": _BUCKET,
    "_experimental_pull_model_checkpoint": "write the adapter of a version with `journeywork export`",
    "_experimental_push_to_s3": _BUCKET,
    "adapter_lease": "name a version in the call by model.get_inference_name(step): it stays loaded meanwhile",
    "cost_calculator": _COSTS,
    "delete": "stop the installation, and delete its run directory",
    "prune_model_adapters": "set trainer.keep_checkpoints: versions are unloaded and deleted by themselves",
    "set_cost_calculator": _COSTS,
}
"""What to do instead of a method of a model or a backend."""


def sentence_for(name: str) -> str | None:
    """Return what to do instead of a dotted name below `art`; `None` for a name that is not refused."""
    while name:
        if name in REFUSED:
            return REFUSED[name]
        name = name.rpartition(".")[0]
    return None


class _Refusal(type):
    """The type of names that are refused: classes, so they can be in annotations, `except` clauses and bases."""

    said: str
    """The message of the error."""

    def refuse(cls, *_: object, **__: object) -> Never:
        """Raise `UnsupportedError` with the sentence."""
        raise UnsupportedError(cls.said)

    __call__ = __contains__ = __getitem__ = __iter__ = __len__ = refuse

    def __getattr__(cls, name: str) -> Never:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__name__!r} has no attribute {name!r}")
        cls.refuse()


def _refusal(full_name: str) -> _Refusal | None:
    """Return the stand-in of a name that is refused; `None` for others."""
    name = full_name.removeprefix(f"{PACKAGE}.")
    if (sentence := sentence_for(name)) is None:
        return None
    said = f"art.{name} is not in Journeywork: {sentence} (docs/art.md)"
    return _Refusal(name.rpartition(".")[2], (UnsupportedError,), {"said": said})


def refusing(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which returns stand-ins for names that are refused."""

    def missing(name: str) -> _Refusal:
        found = None if name.startswith("_") else _refusal(f"{module}.{name}")
        if found is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return found

    return missing


def refuse_method(owner: object, name: str) -> Never:
    """Raise `UnsupportedError` for a method that is refused, else `AttributeError`."""
    where = f"{type(owner).__name__}.{name}"
    if name in METHODS:
        raise UnsupportedError(f"{where} is not in Journeywork: {METHODS[name]} (docs/art.md)")
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")


class _RefusedModule(ModuleType):
    """A module of ART, or a name that a package of ART has beside its modules, that is refused as a whole."""

    def __getattr__(self, name: str) -> Any:
        return refusing(self.__name__)(name)

    def __call__(self, *_: object, **__: object) -> Never:
        _Refusal.refuse(_refusal(self.__name__))  # type: ignore[arg-type]  # the finder made it

    __getitem__ = __iter__ = __call__


class RefusedModules:
    """The last finder of modules: finds those that are refused."""

    @classmethod
    def find_spec(
        cls, full_name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not full_name.startswith(f"{PACKAGE}.") or _refusal(full_name) is None:
            return None
        return ModuleSpec(full_name, cls, is_package=True)  # type: ignore[arg-type]  # as importlib's own finders

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _RefusedModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Nothing is executed."""


sys.meta_path.append(RefusedModules)
