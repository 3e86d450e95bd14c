"""Names of ART that Journeywork does not provide. They can be imported; their use raises an error that says what to do
instead, so a program that imports what it does not reach runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Never

from journeywork.art.errors import UnsupportedError

PACKAGE = "journeywork.art"
_COSTS = "put costs into `trajectory.metrics`; the view `verdicts` holds the judge's"
_BUCKET = "set store.dir to a bucket, and write an adapter with `journeywork export`"
_NAMES: dict[str, str] = {
    "use track_api_cost, which reads the answers' usage and litellm's prices": "api_costs",
    "use auto_trajectory and capture_auto_trajectory of journeywork.art": (
        "auto_trajectory.AutoTrajectoryContext auto_trajectory.auto_trajectory_context_var "
        "auto_trajectory.patch_httpx"
    ),
    "use consume_chat_completion_stream of journeywork.art.openai": (
        "auto_trajectory.parse_sse_to_chat_completion openai.init_chat_completion openai.update_chat_completion"
    ),
    "use the command `journeywork`": "cli",
    "set the environment variable PYTORCH_CUDA_ALLOC_CONF of the installation": "conf",
    _COSTS: (
        "costs metrics.is_builder_managed_metric metrics.is_cumulative_metric_key "
        "metrics.to_cumulative_metric_key metrics_taxonomy model.METRIC_SECTIONS model.METRIC_SPLITS"
    ),
    "pass the string that it stands for": (
        "dev.model.DebugOption dev.model.FSDPOption dev.model.HubStrategy dev.model.IntervalStrategy "
        "dev.model.OptimizerNames dev.model.SaveStrategy dev.model.SchedulerType"
    ),
    "it is a part of ART's own trainer and server; here the installation trains and serves, as its settings say": (
        "dev.engine.WeightTransferConfig dev.get_model_config dev.is_dedicated_mode dev.validate "
        "dev.validate_dedicated_config local.service loss "
        "megatron pipeline_trainer.binary_prefix_tool_pipeline pipeline_trainer.state "
        "pipeline_trainer.yes_no_maybe_pipeline preprocessing tinker tinker_native transformers unsloth "
        "utils.convert_moe_lora utils.lifecycle utils.managed_process utils.model_config vllm_runtime "
        "weight_transfer"
    ),
    "use wrap_rollout and init_chat_model of journeywork.art.langgraph": (
        "langgraph.llm_wrapper.CURRENT_CONFIG langgraph.llm_wrapper.LoggingLLM langgraph.llm_wrapper.add_thread "
        "langgraph.llm_wrapper.create_messages_from_logs langgraph.llm_wrapper.mappings langgraph.logging"
    ),
    "use convert_to_openai_messages of langchain_core.messages": "langgraph.message_utils",
    "name a version in the call by model.get_inference_name(step): it stays loaded meanwhile": (
        "local.adapter_leases"
    ),
    "set trainer.keep_checkpoints: the trainer keeps the newest versions and the best, and the lake every one": (
        "local.checkpoints pipeline_trainer.CHECKPOINT_CREATED_AT_METRIC "
        "pipeline_trainer.CHECKPOINT_EVAL_COMPLETED_METRIC pipeline_trainer.CHECKPOINT_SAVED_METRIC "
        "pipeline_trainer.CheckpointInfo pipeline_trainer.CheckpointRetentionContext "
        "pipeline_trainer.CheckpointRetentionStrategy pipeline_trainer.checkpoint_retention "
        "pipeline_trainer.keep_recent_and_top"
    ),
    "read the rows that model.log writes, or the dashboard": "pipeline_trainer.StatusReporter",
    "query the history with `journeywork sql`, or read trajectories/<split>/<step>.jsonl of the model's folder": (
        "pipeline_trainer.status utils.old_benchmarking utils.trajectory_logging"
    ),
    "import the types from journeywork.art.pipeline_trainer": "pipeline_trainer.types",
    "use ServerlessBackend(base_url=..., api_key=...)": "serverless.client",
    "it is ART's own tests": "test",
    "use gather_trajectories, and take the mean of the rewards": "utils.benchmark_rollout",
    "load_trajectories of journeywork.art.utils.benchmarking returns a table: aggregate and draw it": (
        "utils.benchmarking.aggregate_trajectories utils.benchmarking.charts"
    ),
    "load_trajectories reads the files and keeps no cache": (
        "utils.benchmarking.load_trajectories.cache_path"
    ),
    "log the values with wandb, once for each step": "utils.benchmarking.log_constant_metrics_wandb",
    "use _experimental_pull_from_s3 of LocalBackend": "utils.benchmarking.pull_model_trajectories",
    "write the adapter with `journeywork export`, and deploy that folder with the provider's own tool": (
        "utils.deploy_model utils.deployment"
    ),
    "use get_model_step of journeywork.art.utils": "utils.get_model_step.get_step_from_dir",
    "use polars or `journeywork sql`": "utils.group_aggregate",
    "bind a socket to port 0": "utils.network",
    "no artifacts of Weights & Biases are made; put it into `trajectory.metadata`": (
        "utils.record_provenance"
    ),
    _BUCKET: "utils.s3 utils.s3_checkpoint_utils",
    "use train_sft_from_file of journeywork.art.utils.sft, which reads the file itself": (
        "utils.sft.get_file_row_count utils.sft.iterate_file utils.sft.resolve_sft_batch_size"
    ),
    "use warnings.filterwarnings": "utils.suppress_litellm_serialization_warnings",
    "use Trajectory.model_dump_json and Trajectory.model_validate_json": "utils.trajectory_migration",
    "use yield_trajectory and capture_yielded_trajectory": (
        "yield_trajectory.YieldTrajectoryContext yield_trajectory.yield_trajectory_context_var"
    ),
}
"""Dotted names below `art`, by what to do instead of them. A module stands for all of its names."""
REFUSED: dict[str, str] = {name: sentence for sentence, names in _NAMES.items() for name in names.split()}
"""What to do instead, by name."""
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

    message: str
    """Of the error."""

    def refuse(cls, *_: object, **__: object) -> Never:
        """Raise `UnsupportedError` with the message."""
        raise UnsupportedError(cls.message)

    __call__ = __contains__ = __getitem__ = __iter__ = __len__ = refuse

    def __getattr__(cls, name: str) -> Never:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__name__!r} has no attribute {name!r}")
        cls.refuse()


@functools.cache
def _refusal(full_name: str) -> _Refusal | None:
    """Return the stand-in of a name that is refused, the same class at each call; `None` for others."""
    name = full_name.removeprefix(f"{PACKAGE}.")
    if (sentence := sentence_for(name)) is None:
        return None
    message = f"art.{name} is not in Journeywork: {sentence} (docs/art.md)"
    return _Refusal(name.rpartition(".")[2], (UnsupportedError,), {"message": message})


def refusing(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which returns stand-ins for names that are refused."""

    def stand_in_for(name: str) -> _Refusal:
        refusal = None if name.startswith("_") else _refusal(f"{module}.{name}")
        if refusal is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return refusal

    return stand_in_for


def refused_parts(package: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports what is refused below the package: used as an attribute it says
    the same as when it is imported. A module that has refused names is imported as it is."""

    def import_refused(name: str) -> ModuleType:
        full_name = f"{package}.{name}"
        if name.startswith("_") or sentence_for(full_name.removeprefix(f"{PACKAGE}.")) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(full_name)

    return import_refused


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
