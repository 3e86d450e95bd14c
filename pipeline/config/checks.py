"""Checks of settings that their types do not express: names, addresses, and settings that contradict each other.

`check` is called when settings are loaded and when Journeywork has filled in the rest (`pipeline.running.resolved`), so
that a mistake is told before anything starts. Each error is a `ConfigError` that names the setting and what to do."""

from __future__ import annotations

import math
import re

from pipeline.config.secrets import plain_secrets
from pipeline.config.trainer import TrainerConfig
from pipeline.config.tree import PROCESSES, Config
from pipeline.errors import ConfigError
from pipeline.names import branch_model, is_outside, outside_version
from pipeline.streams import STREAMS

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `--max-lora-rank`. An adapter may have any rank up to the server's."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:-]{0,199}")
_MODEL_NAME = re.compile(rf"(?=.{{1,200}}$){_NAME.pattern}(/{_NAME.pattern})*")
"""Names of models may have parts, as on hubs: `organisation/model`."""


def names_user(addresses: str) -> bool:
    """Return whether one of the comma-separated `addresses` holds a user name, password or token."""
    return any("@" in (a.partition("://")[2] or a).partition("/")[0] for a in addresses.split(","))


def _check_addresses(config: Config) -> None:
    """Refuse addresses with a password, because states, logs and errors show addresses (this error does not), and
    those that no HTTP client can call."""
    http = (
        ("vllm.urls", config.vllm.urls, "vllm.api_key_file"),
        ("judge.api_base", (config.judge.api_base,), "judge.api_key_env"),
        ("teacher.url", (config.teacher.url,), "teacher.api_key_env"),
        ("judge.healing.url", (config.judge.healing.url,), "judge.healing.api_key_env"),
        ("ui.gateway_url", (config.ui.gateway_url,), "the dashboard's page for signing in"),
        ("outside.url", tuple(table.url for table in config.outside), "outside.api_key_env"),
    )
    others = (
        ("nats.url", config.nats.servers, "nats.users or nats.nkey_seed"),
        ("sampler.advertise", config.sampler.advertise, "vllm.api_key_file"),
        ("store.s3_endpoint", (config.store.s3_endpoint,), "the AWS_* variables"),
    )
    for name, urls, instead in (*http, *others):
        if any(map(names_user, urls)):
            raise ConfigError(f"{name}: an address must not hold a user name, password or token; use {instead}")
    for name, urls, _ in http:
        for url in filter(None, urls):
            if not re.match(r"https?://[^/:]", url):
                raise ConfigError(f"{name}: {url!r} is no HTTP address: write http://<host>:<port>")


def _check_log(config: Config) -> None:
    """Refuse limits with which the log would refuse or lose events, and two ways to log in."""
    nats = config.nats
    least = math.ceil(nats.max_payload / min(spec.share for spec in STREAMS))
    if 0 < nats.max_bytes < least:
        raise ConfigError(
            f"nats.max_bytes: {nats.max_bytes} is too small: with fewer than {least:,} bytes a stream could not take "
            "one message of nats.max_payload; 0 leaves the limit to Journeywork"
        )
    window_s = min(spec.duplicate_window_s for spec in STREAMS)
    if nats.publish_deadline_s >= window_s:
        raise ConfigError(
            f"nats.publish_deadline_s must be less than {window_s:g}: the log recognises a repeated event for so many "
            "seconds"
        )
    if 2 * config.judge.timeout_s > nats.rollouts_max_age_s:
        raise ConfigError(
            f"judge.timeout_s: a group may wait at most half of nats.rollouts_max_age_h, which is "
            f"{nats.rollouts_max_age_s / 2:g} s, else the log deletes its runs before they are scored"
        )
    longest_s = nats.rollouts_max_age_s - 2 * config.judge.timeout_s
    if config.feedback.wait_s > longest_s:
        raise ConfigError(
            f"feedback.wait_s is {config.feedback.wait_s:.10g}: it may be at most {longest_s:.10g} s, which is "
            "nats.rollouts_max_age_h less twice judge.timeout_s, else the log deletes a group's runs before they are "
            "scored. Raise nats.rollouts_max_age_h, or score with later feedback by `journeywork rejudge`"
        )
    if nats.users and nats.nkey_seed:
        raise ConfigError("nats: users and nkey_seed are set; set one of them")


def _check_processes(config: Config) -> None:
    """Refuse settings with which inference server, sampler agent and trainer can't run side by side."""
    sampler, urls = config.sampler, config.vllm.urls
    if sampler.advertise and len(sampler.advertise) != len(urls):
        raise ConfigError(
            f"sampler.advertise names {len(sampler.advertise)} servers and vllm.urls {len(urls)}: name one URL for each"
        )
    if "--api-key" in config.vllm.flags:
        raise ConfigError("vllm.args: --api-key would be visible in the list of processes; use vllm.api_key_file")
    trainers = (config.trainer, *map(config.trainer_of, config.models))
    if config.trainer.processes == 1 and any(trainer.memory.sharded for trainer in trainers):
        raise ConfigError("trainer.memory.sharded: set trainer.processes, among which to divide the model")
    if config.vllm.sleep and config.trainer.processes > 1:
        raise ConfigError(
            "vllm.sleep: only a trainer of one process shares its GPU by turns; set trainer.processes = 1"
        )
    if unknown := set(config.environment) - set(PROCESSES):
        raise ConfigError(f"environment: no process {', '.join(sorted(unknown))}; there are: {', '.join(PROCESSES)}")


def _check_names(config: Config) -> None:
    """Refuse names that can't be part of subjects, folders and URLs."""
    names_by_setting = {f"models.{i}.name": m.name for i, m in enumerate(config.models)}
    names_by_setting |= {"project": config.project, "trainer.branch": config.trainer.branch}
    names_by_setting |= {f"outside.{i}.name": table.name for i, table in enumerate(config.outside)}
    for setting, name in names_by_setting.items():
        is_model = setting.startswith(("models.", "outside."))
        if not (_MODEL_NAME if is_model else _NAME).fullmatch(name):
            raise ConfigError(
                f"{setting}: {name!r} can't be a name: expected letters, digits, and '.', '_', '-', '+' or ':' after "
                f"the first, 200 at most{', in parts separated by single slashes' if is_model else ''}"
            )
    names = [m.name for m in config.models]
    if len(set(names)) != len(names):
        raise ConfigError("models: two models have the same name")
    for name in filter(is_outside, names):
        raise ConfigError(f"models: {name!r} would be taken for the version of an outside model: rename it")
    _check_outside(config, names)
    for i, name in enumerate(names):
        for other in names:
            if name.startswith(branch_model(other, "")):
                branch = name.removeprefix(branch_model(other, ""))
                raise ConfigError(
                    f"models.{i}.name: {name!r} is also the name of branch {branch!r} of the model {other!r}, so its "
                    "runs would not be trained; give it a name without '+'"
                )


def _check_outside(config: Config, models: list[str]) -> None:
    """Refuse outside models (a provider's, each with one or several tables of `[[outside]]`) with the name of one in
    `models`, and apprentices (the model that may take over an outside model's runs) that are none of these."""
    policy_names = {*models, *(model.base for model in config.models)}
    for name in (table.name for table in config.outside):
        if name in policy_names or any(name.startswith(branch_model(model, "")) for model in models):
            raise ConfigError(f"outside: {name!r} is also a name of a model in `models`: rename one of them")
    for i, table in enumerate(config.outside):
        if table.apprentice not in ("", *models):
            raise ConfigError(f"outside.{i}.apprentice: {table.apprentice!r} is none of `models`: {', '.join(models)}")
        if table.apprentice != config.apprentices().get(table.name, ""):
            raise ConfigError(f"outside.{i}.apprentice: all tables of {table.name!r} must name the same model")
        if table.shadow_percent and not table.apprentice:
            raise ConfigError(f"outside.shadow_percent: name the apprentice of {table.name!r} in outside.apprentice")


def check_trainer(config: TrainerConfig) -> None:
    """Raise `ConfigError` if settings of the trainer contradict each other."""
    loss, packing = config.loss, config.memory.packing
    if config.late != "off" and loss.importance_sampling == "none":
        raise ConfigError(
            'trainer.late: late runs are corrected by a ratio, and trainer.loss.importance_sampling = "none" takes none'
        )
    if loss.baseline != "group" and loss.advantage_scaling == "group":
        raise ConfigError(
            "trainer.loss.advantage_scaling: a group of one has no standard deviation; with trainer.loss.baseline = "
            f'"{loss.baseline}" take `batch` or `none`'
        )
    if config.optimizer.schedule != "constant" and not config.max_steps:
        raise ConfigError(
            f"trainer.optimizer.schedule: `{config.optimizer.schedule}` falls to 0 at trainer.max_steps, which is 0: "
            "set it to the last step, or take `constant`"
        )
    if config.memory.quantization != "none" and config.memory.sharded:
        raise ConfigError("trainer.memory.quantization: a divided model (trainer.memory.sharded) is not quantised")
    if config.engine == "unsloth" and config.memory.quantization == "fp8":
        raise ConfigError("trainer.memory.quantization: trainer.engine `unsloth` takes `4bit` or `none`")
    if config.engine == "unsloth" and config.memory.sharded:
        raise ConfigError("trainer.memory.sharded: only trainer.engine `transformers` divides a model")
    if config.engine == "unsloth" and packing == "prefix":
        raise ConfigError(
            "trainer.memory.packing: unsloth replaces the attention mask, so prefixes can't be shared; use `padded` or "
            "`auto`"
        )


def check(config: Config, *, whole: bool = True) -> None:
    """Raise `ConfigError` for settings that have the right type and can't be used, alone or together. `whole`: false
    for settings of which only some sections were read; then only addresses are checked."""
    _check_addresses(config)
    if not whole:
        return
    _check_log(config)
    _check_processes(config)
    _check_names(config)
    if name := next(plain_secrets(config.vllm.env, "vllm.env"), ""):
        raise ConfigError(
            f"{name}: a secret does not belong in the settings; set the variable where `journeywork up` is started"
        )
    if name := next(plain_secrets(config.judge.request.params, "judge.request.params"), ""):
        raise ConfigError(f'{name}: a secret does not belong in the settings; name its variable instead: "${{NAME}}"')
    _check_judge(config)
    for model in config.models:
        check_trainer(trainer := config.trainer_of(model))
        if trainer.distill.asks_outside and not config.teacher.url:
            raise ConfigError('trainer.distill.teacher is "outside": set teacher.url and teacher.model')
    _check_adapters(config)


def _check_judge(config: Config) -> None:
    """Refuse rewards, a teacher (`[teacher]`) and a healing (`[judge.healing]`: an outside model answers calls of runs
    that scored low anew) that lack what they need, and group sizes and waits that contradict each other."""
    if healer := config.judge.healing.outside:
        if not any(table.name == healer and table.dialect == "chat" for table in config.outside):
            raise ConfigError(f"judge.healing.outside: `outside` has no model {healer!r} of the dialect chat")
        if not config.may_train(outside_version(healer)):
            raise ConfigError(f"judge.healing.outside: nothing may learn from {healer!r}; see outside.may_train")
        if not config.judge.model:
            raise ConfigError("judge.healing: a correction is judged before it teaches: set judge.model")
    rewards = [r.name for r in config.judge.rewards]
    if len(set(rewards)) != len(rewards):
        raise ConfigError("judge.rewards: two rewards have the same name")
    for reward in config.judge.rewards:
        if reward.kind == "python" and ":" not in reward.entry:
            raise ConfigError(f"judge.rewards: {reward.name} needs an entry such as package.module:function")
        if reward.kind in ("ruler", "next_state") and not config.judge.model:
            raise ConfigError(f"judge.rewards: {reward.name} needs judge.model")
        if reward.kind in ("length", "turns", "context"):
            if reward.limit <= reward.free:
                raise ConfigError(f"judge.rewards: {reward.name} needs a `limit` larger than its `free`")
            if config.judge.combine in ("product", "min"):
                raise ConfigError(
                    f"judge.rewards: {reward.name} is a penalty, 0 at best: set judge.combine to mean or sum"
                )
    if config.feedback.wait_for == "all" and not config.feedback.wait_s:
        raise ConfigError("feedback.wait_for: `all` needs feedback.wait_s, the time that a group waits")
    if config.judge.min_size > config.judge.group_size:
        raise ConfigError("judge.min_size is larger than judge.group_size")
    if bool(config.teacher.url) != bool(config.teacher.model):
        raise ConfigError("teacher: url and model belong together; set both or none")


def _check_adapters(config: Config) -> None:
    """Refuse inference servers that can't hold the adapters of the models: by their rank, or by their number."""
    served_rank = config.vllm.max_lora_rank
    rank = max((config.trainer_of(m).lora.rank for m in config.models), default=1)
    if served_rank not in _LORA_RANKS:
        raise ConfigError(f"vllm.max_lora_rank is {served_rank}: vLLM takes {', '.join(map(str, _LORA_RANKS))}")
    if rank > _LORA_RANKS[-1]:
        raise ConfigError(f"trainer.lora.rank is {rank}: vLLM serves adapters up to rank {_LORA_RANKS[-1]}")
    if rank > served_rank and not config.vllm.urls:  # servers that run already have limits of their own
        raise ConfigError(
            f"trainer.lora.rank is {rank}, above vllm.max_lora_rank = {served_rank}: vLLM would refuse the adapter; "
            f"set vllm.max_lora_rank to {next(r for r in _LORA_RANKS if r >= rank)}"
        )
    if config.models and config.max_loras() <= len(config.models):
        raise ConfigError(
            f"vllm.max_loras is {config.vllm.max_loras}: it must be larger than the number of models, "
            f"{len(config.models)}, because the served version of each model stays loaded until a newer one serves"
        )
    staleness = max((config.trainer_of(m).max_staleness for m in config.models), default=0)
    if config.max_loras() < staleness + 2 and not config.vllm.urls:
        raise ConfigError(
            f"vllm.max_loras is {config.vllm.max_loras}: it must be at least trainer.max_staleness + 2 = "
            f"{staleness + 2}, else requests in flight lose their adapter"
        )
