"""The environment variables that each process of an installation gets: those that it needs, and those that its
settings name. A process that does not see a secret can't lose it, so none gets the whole environment.

The supervisor (`environment_of`) and `journeywork up` (`require_variables`) use it. A name that ends in `*` is a
prefix. docs/operations.md shows the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.config import Config, ConfigError
from pipeline.config.secrets import referenced_variables

_USER = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TEMP", "TMP")
_INTERPRETER = ("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "PYTHON*", "JOURNEYWORK_CRASH")
EVERY = (*_USER, *_INTERPRETER)
"""Variables of every process: paths of programs, libraries and temporary files, and the language."""

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy")
_OUTWARD = (*_PROXIES, "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables of processes that connect to the internet. A proxy's address may hold a password."""

_GPU = ("CUDA*", "NVIDIA_*", "NCCL_*", "GLOO_*", "UCX_*", "TORCH*", "PYTORCH_*", "TRITON_*", "FLASHINFER_*", "TVM_*")
_THREADS = ("OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*", "ATEN_*")
_HUB = ("HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "SAFETENSORS_*", "TOKENIZERS_*")
_COMPILING = ("CC", "CXX", "LIBRARY_PATH", "CPATH", "MAX_JOBS")
_COMPUTE = (*_GPU, *_THREADS, *_HUB, *_COMPILING, "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
"""Variables of processes that load a model."""

NEEDS: dict[str, tuple[str, ...]] = {
    "nats": (),
    "vllm": (*_COMPUTE, *_OUTWARD, "VLLM_*", "RAY_*", "JOURNEYWORK_VLLM_LORA"),
    "sampler": (),
    "gateway": ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"),
    "judge": (*_OUTWARD, "LITELLM_*"),
    "trainer": (*_COMPUTE, *_OUTWARD, "UNSLOTH_*", "ACCELERATE_*"),
    "store": (*_OUTWARD, "AWS_*"),
    "ui": (*_OUTWARD, "AWS_*"),
    "telemetry": (*_OUTWARD, "OTEL_*", "LANGFUSE_*"),
}
"""Further variables of each process."""

_PROVIDERS = {
    "vertex_ai": ("VERTEXAI_*", "VERTEX_*", "GOOGLE_*"),
    "gemini": ("GEMINI_*", "GOOGLE_*"),
    "bedrock": ("AWS_*",),
    "sagemaker": ("AWS_*",),
    "azure_ai": ("AZURE_*",),
    "huggingface": ("HF_*", "HUGGINGFACE_*"),
    "together_ai": ("TOGETHER*",),
    "fireworks_ai": ("FIREWORKS*",),
    "perplexity": ("PERPLEXITY*",),
}
"""Prefixes of providers whose variables do not begin with the provider's name."""


def variable_names(config: Config, process: str) -> tuple[str, ...]:
    """Return the names (and beginnings with `*`) of the variables that `process` gets."""
    names = [name for _, name in _variables_in_settings(config, process)]
    if process == "judge":
        names += _key_variables(config.judge.model)
        if config.teacher.url:
            names += NEEDS["gateway"]  # it reads the tokenizer of the base as the gateway does
    if process == "gateway" and config.outside:
        names += _OUTWARD
    return (*EVERY, *NEEDS.get(process, ()), *names, *config.environment.get(process, ()))


def _variables_in_settings(config: Config, process: str) -> list[tuple[str, str]]:
    """Return the settings of `process` that name an environment variable, each with the variable's name."""
    judge = config.judge
    named = {
        "judge": [
            ("judge.api_key_env", judge.api_key_env),
            ("judge.healing.api_key_env", judge.healing.api_key_env),
            ("teacher.api_key_env", config.teacher.api_key_env),
            *(("judge.request.params", name) for name in referenced_variables(judge.request.params)),
        ],
        "gateway": [
            ("gateway.key_secret_env", config.gateway.key_secret_env),
            *(("outside.api_key_env", table.api_key_env) for table in config.outside),
        ],
    }
    return [(setting, name) for setting, name in named.get(process, ()) if name]


def require_variables(config: Config, processes: Iterable[str], environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a setting of one of `processes` names a variable that `environ` lacks: the process would
    say so only after others have started."""
    for process in processes:
        for setting, name in _variables_in_settings(config, process):
            if not environ.get(name):
                raise ConfigError(f"{setting}: the environment has no {name}; set it where `journeywork up` starts")


def _key_variables(model: str) -> tuple[str, ...]:
    """Return the environment variables (a trailing `*` marks a prefix) from which litellm reads the key of a model, by
    the provider before its slash. A name without a slash is Anthropic's or OpenAI's."""
    if not model:
        return ()
    provider, slash, _ = model.partition("/")
    if not slash:
        provider = "anthropic" if model.startswith("claude") else "openai"
    return _PROVIDERS.get(provider, (f"{provider.upper()}_*",))


def environment_of(config: Config, process: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that `process` gets."""
    names = variable_names(config, process)
    exact = {n for n in names if not n.endswith("*")}
    beginnings = tuple(n[:-1] for n in names if n.endswith("*"))
    return {k: v for k, v in environ.items() if k in exact or k.startswith(beginnings)}
