"""Keeps a run to its minutes: the number of steps follows the speed at which they are made."""

from gptmini.model.optim import get_cooldown_steps
from gptmini.plan.minutes import compute_steps_for_minutes
from gptmini.plan.recipe import compute_useful_steps
from gptmini.train.state import Training

# After which the number of steps is fitted to the minutes again; just before the cool-down, after
# each.
STEPS_BETWEEN_FITS = 5


def keep_to_minutes(training: Training) -> None:
    """Before the cool-down, fit the number of steps to the minutes at the speed so far.

    Steps before the cool-down do not depend on the total, so the final configuration describes the
    whole run.
    """
    config = training.config
    settings = config.train
    now = (training.step, training.elapsed)
    since = training.first_step
    if since is None:
        training.first_step = now
        since = (0, training.elapsed - training.progress.seconds)  # all updates so far
    cooldown_begins = settings.steps - get_cooldown_steps(settings)
    to_next = STEPS_BETWEEN_FITS - training.step % STEPS_BETWEEN_FITS
    is_last_chance = training.step - 1 <= cooldown_begins < training.step + to_next
    if to_next < STEPS_BETWEEN_FITS and not is_last_chance:
        return
    on_rank_zero = training.group.on_rank_zero
    held_out = training.corpus.held_out
    steps = on_rank_zero(compute_steps_for_minutes, config, since, now, held_out)
    if steps > settings.steps:
        useful = compute_useful_steps(config, training.plan.text_size)  # more overfit
        steps = max(settings.steps, int(min(steps, useful)))
    if steps != settings.steps:
        training.config = config.with_train(steps=steps)
        on_rank_zero(training.run.write_config, training.config)
