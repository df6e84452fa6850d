"""What is trained by sampling: hard attention's gradient (Xu et al. 2015, section 4.1), and
captions by their score (`advantages`; `captioner.self_critical` samples them).

The regions s_1..s_T that hard attention draws are latent. Trained is a lower bound on log p(y | a),
the mean over s of log p(y | s, a), whose gradient has two parts:

    d log p(y | s, a)  +  log p(y | s, a)  d log p(s | a)

The first is ordinary backpropagation with the drawn regions; `surrogate` gives a loss whose
gradient is minus the second, estimated by REINFORCE (Williams 1992), with the paper's two ways to
lower its variance, a moving-average baseline and an entropy term.

Two things differ from the paper's text, and leave the estimator's mean as it is. A region drawn for
word t can change only the words from t on, so its reward is the log-probability of those instead of
the whole caption's. And the baseline is kept per position, because first words are easier than
later ones. Everything stays in log-space: alpha may be 0.
"""

from collections.abc import Callable
from typing import Any

from keras import ops

__all__ = ["BASELINE_POSITIONS", "advantages", "rewards", "surrogate", "updated_baseline"]

BASELINE_POSITIONS = 64  # later words share the last position's baseline


def advantages(rewards: Any) -> Any:
    """How much better each of a photo's sampled captions is than the others, `(B, K)`.

    The others' mean is a baseline that costs nothing and does not depend on the sample, so the
    estimator of the gradient stays unbiased (Kool et al. 2019; self-critical training, Rennie et
    al. 2017, arXiv 1612.00563, has the greedy caption's reward in its place).

    Args:
        rewards: `(B, K)`, K > 1.
    """
    count = rewards.shape[-1]
    return (rewards * count - ops.sum(rewards, axis=-1, keepdims=True)) / (count - 1)


def _per_position(baseline: Any, length: int) -> Any:
    return ops.take(baseline, ops.minimum(ops.arange(length), BASELINE_POSITIONS - 1))


def rewards(log_likelihood: Any, real: Any, baseline: Any) -> Any:
    """What the words from t on said better than usual, `(B, C, T)`.

    Args:
        log_likelihood: `(B, C, T)`, log p of every target word.
        real: `(B, C, T)`, 1 for words and their end, 0 for pads.
        baseline: `(BASELINE_POSITIONS,)`, b: the usual log p of a word at each position.
    """
    advantage = (log_likelihood - _per_position(baseline, log_likelihood.shape[-1])) * real
    return ops.flip(ops.cumsum(ops.flip(advantage, axis=-1), axis=-1), axis=-1)


def surrogate(
    reward: Any,
    log_chosen: Any,
    alpha: Any,
    real: Any,
    drawn: Any,
    reward_weight: float,
    entropy_weight: float,
) -> Any:
    """The sum over all drawn words of `-lambda_r reward log p(s_t) - lambda_e H(alpha_t)`.

    Args:
        reward: `(B, C, T)`, from `rewards`; no gradient flows into it.
        log_chosen: `(B, C, T)`, log p(s_t), log alpha of the region drawn.
        alpha: `(B, C, T, L)`.
        real: `(B, C, T)`, 1 for words and their end, 0 for pads.
        drawn: `(B,)`, 0 for photos that saw the expected context: they have nothing to estimate.
        reward_weight: lambda_r; 1 is the bound's own gradient.
        entropy_weight: lambda_e.
    """
    counts = real * drawn[:, None, None]
    # Inside the logarithm alpha is kept from 0, where alpha log alpha is 0 but has no gradient.
    entropy = -ops.sum(alpha * ops.log(ops.maximum(alpha, 1e-20)), axis=-1)
    gain = reward_weight * ops.stop_gradient(reward) * log_chosen + entropy_weight * entropy
    return -ops.sum(gain * counts)


def updated_baseline(
    baseline: Any,
    log_likelihood: Any,
    real: Any,
    drawn: Any,
    decay: float,
    mean: Callable[[Any], Any] = ops.convert_to_tensor,
) -> Any:
    """b <- decay b + (1 - decay) mean log p, at every position that has words in the batch.

    Args:
        baseline: `(BASELINE_POSITIONS,)`.
        log_likelihood, real, drawn: as above.
        decay: 0.9 in the paper.
        mean: over all replicas, where several share the batch.
    """
    length = min(log_likelihood.shape[-1], BASELINE_POSITIONS)
    counts = (real * drawn[:, None, None])[..., :length]
    number = mean(ops.sum(counts, axis=(0, 1)))
    total = mean(ops.sum(log_likelihood[..., :length] * counts, axis=(0, 1)))
    old = baseline[:length]
    usual = total / ops.where(number > 0, number, 1.0)
    new = ops.where(number > 0, decay * old + (1 - decay) * usual, old)
    return ops.concatenate([new, baseline[length:]])
