"""Settings that have another name now: an error about an old name says the new one."""

from __future__ import annotations

_TABLES = {
    "trainer.unsloth": "load_in_4bit max_seq_length",
    "trainer.lora": "lora_rank=rank lora_alpha=alpha lora_targets=targets",
    "trainer.loss": "loss_type=type beta kl_unbiased sampler_correction=importance_sampling "
    "correction_max=importance_clip correction_min=importance_clip_min importance_level epsilon "
    "epsilon_high delta off_policy_mask entropy_coef loss_options=options advantage_scaling "
    "weighting mask_truncated max_completion_length",
    "trainer.optimizer": "learning_rate lr_schedule=schedule warmup_steps weight_decay adam_betas=betas max_grad_norm",
    "trainer.memory": "tokens_per_batch gradient_checkpointing gpu_memory_share=gpu_share packing attention",
    "judge": "judgings=passes",
    "judge.request": "request_timeout_s=timeout_s retries structured temperature max_tokens params model_params",
    "judge.anchors": "anchors=file anchor_every_s=every_s anchor_min_tau=min_tau",
    "gateway.http": "max_body_bytes max_control_body_bytes max_buffered_bytes max_connections head_timeout_s "
    "body_timeout_s idle_timeout_s write_timeout_s hosts cors_origins trusted_proxies",
    "gateway.replicas": "request_timeout_s=timeout_s upstream_wait_s=wait_s deadly_request_s health_interval_s "
    "health_retry_s probe",
    "gateway.detection": "infer=enabled infer_idle_s=idle_s infer_outcome=outcome",
}
"""Table to the settings that moved into it from its section, as `old` or `old=new`."""

MOVED = {
    f"{table.partition('.')[0]}.{old}": f"{table}.{new or old}"
    for table, words in _TABLES.items()
    for old, _, new in (word.partition("=") for word in words.split())
}
"""Old dotted name to new dotted name."""
