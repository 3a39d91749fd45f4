"""Map the names of settings in nanoGPT, transformers and litgpt to ours, or to advice in words.

Those that people type; a longer list would only be longer.
"""

PRETRAINED_REMEDY = "use --from runs/NAME, a run that gptmini import makes"

_BETAS = "set train.betas, a list of both"
_CHOSEN_DTYPE = "set train.dtype to float32, bfloat16 or float16"
_FINETUNING = "leave it out; fine-tuning with --from trains all weights"
_MICRO_BATCH = "set train.micro_batch_size, the rows of a pass; gradients add up over batch_size"
_NAMED_BY_OUT = "name the run with --out"
_RESUMES = "run the same command again, which resumes"
_STEPS_OR_MINUTES = "set train.steps, or train.minutes; gptmini size counts the epochs"

# Either the key of a setting or, where none does the same, a remedy in words.
ALIASES = {
    # -- models
    "block_size": "model.context_length",
    "hidden_size": "model.d_model",
    "intermediate_size": "model.d_ff",
    "max_position_embeddings": "model.context_length",
    "n_embd": "model.d_model",
    "n_heads": "model.n_head",
    "n_layers": "model.n_layer",
    "num_attention_heads": "model.n_head",
    "num_hidden_layers": "model.n_layer",
    "num_key_value_heads": "model.attention.n_kv_head",
    # -- nanoGPT
    "beta1": _BETAS,
    "beta2": _BETAS,
    "dataset": "data.path",
    "decay_lr": "set train.cooldown: 0 for a rate that does not fall",
    "eval_interval": "train.eval_every",
    "eval_iters": "set train.eval_tokens, which counts tokens",
    "eval_only": "use gptmini evaluate",
    "from": "base.run",
    "gradient_accumulation_steps": _MICRO_BATCH,
    "init_from": PRETRAINED_REMEDY,
    "learning_rate": "train.lr",
    "log_interval": "train.log_every",
    "lr_decay_iters": "set train.steps; the rate reaches min_lr at the last of them",
    "max_iters": "train.steps",
    "num_samples": "use gptmini generate --samples",
    "out_dir": _NAMED_BY_OUT,
    "wandb_log": "set train.log_to: wandb",
    "warmup_iters": "train.warmup_steps",
    # -- litgpt
    "checkpoint_dir": PRETRAINED_REMEDY,
    "epochs": _STEPS_OR_MINUTES,
    "global_batch_size": "train.batch_size",
    "max_seq_length": "train.seq_len",
    "max_tokens": "set sample.max_new_tokens; for the length of training, set train.steps",
    "precision": _CHOSEN_DTYPE,
    "resume": _RESUMES,
    # -- transformers
    "bf16": _CHOSEN_DTYPE,
    "fp16": _CHOSEN_DTYPE,
    "lora_r": _FINETUNING,
    "max_grad_norm": "train.grad_clip",
    "max_steps": "train.steps",
    "model_name_or_path": PRETRAINED_REMEDY,
    "num_train_epochs": _STEPS_OR_MINUTES,
    "output_dir": _NAMED_BY_OUT,
    "per_device_train_batch_size": _MICRO_BATCH,
    "report_to": "train.log_to",
    "resume_from_checkpoint": _RESUMES,
}
