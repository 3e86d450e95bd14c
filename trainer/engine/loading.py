"""Loads a base model and adds a fresh LoRA adapter, with one of two engines.

`transformers` runs on CPU and CUDA. `unsloth` (CUDA only) patches the model's code: it is faster, but it replaces the
attention mask by a plain causal one, so prefixes can't be shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
from dataclasses import dataclass
from types import CodeType
from typing import Any

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PretrainedConfig,
    TorchAoConfig,
)
from transformers.pytorch_utils import Conv1D

from pipeline.config import ConfigError, TrainerConfig
from pipeline.config.checks import check_trainer
from pipeline.telemetry.logs import get_logger
from trainer.engine.forward import disable_randomness, towers_of

logger = get_logger("trainer.engine.loading")

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of the linear layers that get an adapter with Unsloth, if `trainer.lora.targets` is empty."""


_VALUES_PER_TENSOR = 64
"""Values of a tensor in a base model's digest, at equal distances."""
_KEYS_OF_COPIES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of a config.json that differ between copies of one model."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A base model with a fresh adapter."""

    model: Any
    lora: LoraConfig
    accepts_masks: bool
    """Whether the model applies the attention masks it is given. Shared prefixes require it."""
    longest: int | None = None
    """Number of tokens after which the model cuts a sequence off. `None`: it cuts none."""
    checkpointing: bool = False
    """Whether gradient checkpointing is on: layers recompute their activations in the backward pass."""


def device_for(config: TrainerConfig) -> torch.device:
    """Return CUDA if available, else the CPU. Raises `ConfigError` if the engine or a setting can't be used there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_trainer(config)
    if config.engine == "unsloth" and device.type != "cuda":
        raise ConfigError("trainer.engine: `unsloth` needs a CUDA GPU, and none was found; use `transformers`")
    return device


def dtype_for(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """Return the type of the model's weights: `trainer.dtype`, or for `auto` float32 on CPU and bfloat16 on CUDA."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def load(base: str, config: TrainerConfig, device: torch.device) -> LoadedModel:
    """Load `base` (a folder or a name on the Hugging Face Hub) and add a fresh adapter.

    The adapter's initial weights depend on `config.seed` only. Raises `ConfigError` if the settings contradict each
    other or the model, or if the model can't be loaded; errors of the device as PyTorch does."""
    check_trainer(config)
    try:
        return (_load_unsloth if config.engine == "unsloth" else _load_transformers)(base, config, device)
    except (ImportError, KeyError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        # Unsloth refuses a model by a RuntimeError. Those of the device, such as a full memory, can pass.
        if isinstance(error, ConfigError | torch.OutOfMemoryError | torch.AcceleratorError):
            raise
        raise ConfigError(f"{base} can't be trained: {first_sentence(error)}") from error


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message, at most 300 characters: libraries print whole modules."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[.!?]) ", text)[0].rstrip(".")[:300]


def auto_class(base: str) -> Any:
    """Return the class of transformers that loads a base model: another one if the model takes images."""
    takes_images = type(AutoConfig.from_pretrained(base)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def _load_transformers(base: str, config: TrainerConfig, device: torch.device) -> LoadedModel:
    """Load a model with transformers, and add a fresh adapter. `PolicyModel` moves it to the device; a quantised model
    is loaded there."""
    options: dict[str, Any] = {"dtype": dtype_for(config, device), "output_loading_info": True}
    if quantization := _quantization(config, options["dtype"]):
        options |= {"quantization_config": quantization, "device_map": {"": device}}
    model, loading_info = auto_class(base).from_pretrained(base, **options)
    if missing := sorted(loading_info["missing_keys"]):  # transformers gives them random values, and only prints it
        raise ConfigError(
            f"{base} can't be trained: its weights lack {len(missing)} of the model's tensors: {', '.join(missing[:3])}"
        )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # On such a CPU, 4-bit layers would compute passes without a gradient in bfloat16, and all others would fail
            # or have other logprobs.
            module.support_avx512bf16_for_cpu = False
    if config.dtype == "float64" and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # PyTorch's grouped product has no float64
    # vLLM serves no adapters on vision towers, unless it is told to.
    towers = "|".join(map(re.escape, towers_of(model)))
    lora = LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=find_lora_targets(model, config),
        exclude_modules=rf"({towers})\..*" if towers else None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(config.seed)
    peft = get_peft_model(model, lora)
    disable_randomness(peft)
    required = config.memory.gradient_checkpointing == "on"
    checkpointing = wants_checkpointing(config, device) and enable_checkpointing(model, required=required)
    return LoadedModel(peft, lora, accepts_masks=True, checkpointing=checkpointing)


def _quantization(config: TrainerConfig, dtype: torch.dtype) -> Any:
    """Return transformers' settings for `trainer.memory.quantization`; `None` for `none`.

    transformers leaves the output layer, whose weights may be those of the embeddings, as it is. Raises `ImportError`
    if torchao is needed and not installed."""
    if config.memory.quantization == "none":
        return None
    if config.memory.quantization == "4bit":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    from torchao.quantization import Float8WeightOnlyConfig  # for `fp8`

    return TorchAoConfig(Float8WeightOnlyConfig())


_PEAKS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362, "L4": 121, "A10": 125}
"""Peak rates of GPUs for dense bfloat16, in TFLOP/s, by NVIDIA's data sheets."""


def peak_tflop_per_s(device: str) -> float | None:
    """Return the peak rate of a GPU by its name, such as "NVIDIA H100 80GB HBM3"; `None` if it is not known here."""
    return next((float(peak) for name, peak in _PEAKS.items() if name in device), None)


def base_digest(base: str, model: torch.nn.Module) -> str:
    """Return a hash of a base model: its config.json, and of every tensor the name, the shape and some values.

    `base` is its folder or hub name, `model` the model as it is loaded. Models of one family have equal names and
    shapes, so only values tell a fine-tuned model from its base. They are rounded to bfloat16: the digest does not
    depend on `trainer.dtype`. Adapters and quantised tensors are left out."""
    config = {k: v for k, v in PretrainedConfig.get_config_dict(base)[0].items() if k not in _KEYS_OF_COPIES}
    digest = hashlib.sha256(msgspec.json.encode(config, order="sorted"))
    for name, tensor in sorted(model.named_parameters()):
        quantised = type(tensor.data) is not torch.Tensor or not tensor.is_floating_point()
        if "lora_" in name or quantised:
            continue
        digest.update(f"{name.replace('.base_layer', '')} {tuple(tensor.shape)}".encode())
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // _VALUES_PER_TENSOR)]
        digest.update(values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def wants_checkpointing(config: TrainerConfig, device: torch.device) -> bool:
    """Whether a model is loaded with gradient checkpointing. With `auto` it is if it can't be switched on later
    (`PolicyModel.save_memory`): on a GPU, with Unsloth or where processes wait for each other within a pass."""
    memory = config.memory
    if memory.gradient_checkpointing == "auto":
        return device.type == "cuda" and (memory.sharded or config.engine == "unsloth")
    return memory.gradient_checkpointing == "on"


def enable_checkpointing(model: Any, *, required: bool) -> bool:
    """Switch gradient checkpointing on. Returns whether it is on: not every model supports it.

    Raises `ConfigError` if it is `required` and the model does not support it."""
    try:
        # The model draws no random numbers (see `disable_randomness`), so no generator state has to be restored.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    except (ValueError, NotImplementedError) as error:
        if required:
            raise ConfigError(
                f"trainer.memory.gradient_checkpointing: {type(model).__name__} does not support it ({error}); use "
                "`auto` or `off`"
            ) from error
        logger.warning("the model does not support gradient checkpointing: passes take more memory", error=str(error))
        return False
    return True


def find_lora_targets(model: Any, config: TrainerConfig) -> list[str]:
    """Return the last parts of the names of the linear layers that get an adapter, sorted: `trainer.lora.targets`, or
    all layers that can have one.

    These can't: routers, because vLLM does not serve adapters on them; experts, which are stacked parameters and no
    linear layers; layers of a list, because their names are numbers, as those of the decoder's layers are; and layers
    whose weight another module reads. Raises `ConfigError` if the setting names a layer that can't have an adapter."""
    head = model.get_output_embeddings()
    towers = tuple(f"{path}." for path in towers_of(model))
    linear = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, (torch.nn.Linear, Conv1D)) and m is not head and not name.startswith(towers)
    }
    # A model's own subclass of Linear may return more than the product: Llama4's router returns scores and logits.
    excluded = {
        _leaf(name)
        for name, m in linear.items()
        if type(m) is not Conv1D and type(m).__module__.startswith("transformers.models.")
    }
    excluded |= {_leaf(name) for name in linear if _leaf(name).isdecimal()} | _weights_read_by_parents(model)
    # A target is the last part of a name, so dense MLP layers beside the experts are left out with them.
    if any("experts" in name and p.dim() == 3 for name, p in model.named_parameters()):
        excluded |= {"gate", "router", "shared_expert_gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    possible = {_leaf(name) for name in linear} - excluded
    if unknown := set(config.lora.targets) - possible:
        raise ConfigError(
            f"trainer.lora.targets: {', '.join(sorted(unknown))} can't have an adapter; layers of this model that can: "
            f"{', '.join(sorted(possible))}"
        )
    return sorted(config.lora.targets or possible)


_READ_WEIGHT = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device))")
"""Code that reads the weight of a submodule, and not only its type or device."""


def _weights_read_by_parents(model: Any) -> set[str]:
    """Return the names of submodules whose weight a method of their parent reads, as its source code shows.

    Such a method passes the weight to a fused kernel, as mixers of Mamba do with `out_proj`, and bypasses an
    adapter."""
    methods = {
        method
        for kind in {base for module in model.modules() for base in type(module).__mro__}
        for name, method in vars(kind).items()
        if inspect.isfunction(method)
        and name not in ("__init__", "_init_weights")
        # Finding a method's source takes milliseconds, and a model has hundreds of methods.
        and "weight" in _names_in(inspect.unwrap(method).__code__)
    }
    names: set[str] = set()
    for method in methods:
        with contextlib.suppress(OSError):  # its source is not there
            names.update(_READ_WEIGHT.findall(inspect.getsource(method)))
    return names


def _names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and globals that `code` and the functions inside it use."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*inner)


def _leaf(name: str) -> str:
    """The last part of a module's dotted name."""
    return name.rpartition(".")[2]


def _load_unsloth(base: str, config: TrainerConfig, device: torch.device) -> LoadedModel:
    """Load a model with Unsloth, and add a fresh adapter. Unsloth itself moves the model to the GPU: `device` only
    decides the dtype, and what `auto` means for checkpointing. `check_trainer` has refused quantisation other than
    `4bit`.

    `_load_transformers` checks more. Unsloth does not return which tensors the weights lacked, and has checkpointing of
    its own for every model that it loads. `trainer.lora.targets` are not checked, so they should not name a router,
    on which vLLM serves no adapter."""
    # Imported only here, because the import patches transformers and PEFT for the whole process.
    from unsloth import FastLanguageModel

    # Beyond the model's own limit Unsloth would scale its positions, which the inference server does not.
    model_limit = getattr(AutoConfig.from_pretrained(base).get_text_config(), "max_position_embeddings", None)
    if model_limit is None:
        raise ConfigError(
            f"{base} can't be trained with Unsloth: its config.json has no max_position_embeddings; set "
            "trainer.engine to `transformers`"
        )
    longest = min(model_limit, config.unsloth.max_seq_length or model_limit)
    if longest < config.unsloth.max_seq_length:
        logger.warning("longer sequences than the model's own limit are not trained", base=base, limit=model_limit)
    checkpointing = wants_checkpointing(config, device)
    model, _ = FastLanguageModel.from_pretrained(
        model_name=base,
        # Else Unsloth takes a copy of its own for many names of the hub, which may differ from what is served: some are
        # quantised. For names that it does not know it asks GitHub for a newer table of them.
        use_exact_model_name=True,
        max_seq_length=longest,
        load_in_4bit=config.memory.quantization == "4bit",
        dtype=dtype_for(config, device),
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        lora_dropout=0,
        bias="none",
        target_modules=list(config.lora.targets or TARGETS),
        use_gradient_checkpointing="unsloth" if checkpointing else False,
        random_state=config.seed,
    )
    disable_randomness(model)
    return LoadedModel(
        model, model.peft_config["default"], accepts_masks=False, longest=longest, checkpointing=checkpointing
    )
