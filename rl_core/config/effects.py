"""Keys that are set, but have no effect in the mode that the other keys choose. Said once at the start, never silently."""

from rl_core.config.schema import Config

OFFLOADS = ("param_offload", "optimizer_offload", "offload_policy", "activation_cpu_offload")


def without_effect(config: Config, ranks: int, on_gpu: bool) -> list[str]:
    """One sentence per key whose value is not the default and changes nothing in a run on so many ranks.

    `reduce_dtype: bfloat16` is named too: it has an effect, a bad one.
    """
    said = []
    trainer, algorithm = config.trainer, config.algorithm
    if trainer.max_steps is not None and trainer.num_train_epochs != 1:
        said.append("trainer.num_train_epochs has no effect beside trainer.max_steps")
    if trainer.max_tokens_per_micro_batch is not None and trainer.per_device_train_batch_size != 8:
        said.append("trainer.per_device_train_batch_size has no effect beside trainer.max_tokens_per_micro_batch")
    if algorithm.kl_in == "none":
        if algorithm.kl_coef != 0.001 or algorithm.kl_estimator is not None:
            said.append("algorithm.kl_coef and kl_estimator have no effect with algorithm.kl_in = none")
        if config.ref_model != type(config.ref_model)():
            said.append("ref_model has no effect with algorithm.kl_in = none: no reference model is built")
    for role in ("actor", "critic", "ref"):
        fsdp = config.fsdp_of(role)  # type: ignore[arg-type]
        where = f"{'ref_model' if role == 'ref' else role}.fsdp"
        if fsdp.hsdp_group_size is not None and fsdp.strategy != "hsdp":
            said.append(f"{where}.hsdp_group_size has no effect with strategy = {fsdp.strategy}")
        if fsdp.wrap_policy.auto_wrap == "NO_WRAP" and (
            fsdp.wrap_policy.transformer_layer_cls_to_wrap or fsdp.wrap_policy.min_num_params
        ):
            said.append(f"{where}.wrap_policy: the classes and min_num_params have no effect with NO_WRAP")
        if not on_gpu:
            said.extend(f"{where}.{key} has no effect on a CPU" for key in OFFLOADS if getattr(fsdp, key))
        if fsdp.mixed_precision.reduce_dtype == "bfloat16":
            said.append(f"{where}.mixed_precision.reduce_dtype = bfloat16 loses small gradients; float32 is safer")
    for name, trained in (("actor", config.actor), ("critic", config.critic)):
        if trained.min_lr_ratio and trained.lr_scheduler_type == "constant":
            said.append(f"{name}.min_lr_ratio has no effect with lr_scheduler_type = constant")
    # What holds for all roles alike is said once, under the key that the user wrote.
    shared = {line.split(".", 1)[1] for line in said if line.startswith("actor.fsdp")}
    same = {rest for rest in shared if all(f"{role}.{rest}" in said for role in ("actor", "critic", "ref_model"))}
    return [line for line in said if line.split(".", 1)[1] not in same] + sorted(same)
