"""Training on several GPUs or machines with TensorFlow's own strategies: who does what.

Every replica computes the gradient of its share of each batch; sums over all of them make what one
process would have computed of the whole batch (`mean_of_replicas` and `captioner.rates` see to the
places where a mean of means would be another number). Machines run the same program and say the
same collective operations in the same order; only the chief writes.

Keras 3's `fit` fails under `MultiWorkerMirroredStrategy` (keras-team/keras#20585), hence
`captioner.training` calls the model's train function itself, whatever the strategy.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import tensorflow as tf

from captioner.errors import InputError

__all__ = ["STRATEGIES", "Team", "mean_of_replicas", "share_of_replica"]

STRATEGIES = ("auto", "mirrored", "multiworker")
LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.FailedPreconditionError,
    tf.errors.DeadlineExceededError,
)


def mean_of_replicas(value: Any) -> Any:
    """Inside `strategy.run`: the mean of a tensor over all replicas, the same in all of them.

    What divides the losses of replicas must be this, for their sum to be that of one.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return value
    return context.all_reduce(tf.distribute.ReduceOp.MEAN, value)


def share_of_replica(loss: Any) -> Any:
    """A replica's part of the loss: gradients of replicas are summed, and Keras, too, takes what
    `compute_loss` returns to be divided by their number."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return loss if replicas == 1 else loss / replicas


class Team:
    """The processes that train together, as one of them sees it.

    Make it before any other TensorFlow operation: several machines have to find each other first.

    Args:
        name: `mirrored`: all GPUs of this machine; `multiworker`: the machines in the environment
            variable `TF_CONFIG`, with all GPUs of each; `auto`: what there is, if more than one.

    Attributes:
        strategy: what TensorFlow distributes by; its default one for a single device.
        workers: processes.
        worker: this one's number, from 0.
        replicas: devices of all processes.

    Raises:
        InputError: `multiworker` without a `TF_CONFIG` that TensorFlow understands.
    """

    def __init__(self, name: str = "auto") -> None:
        several = _workers(os.environ.get("TF_CONFIG", ""))
        if name == "multiworker" and several == 0:
            raise InputError(
                "--strategy multiworker: the environment variable TF_CONFIG must list the "
                "machines (see docs/many-machines.md)"
            )
        self.strategy: tf.distribute.Strategy
        if name == "multiworker" or (name == "auto" and several > 1):
            try:
                self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
            except (ValueError, RuntimeError, tf.errors.OpError) as error:
                reason = str(error).splitlines()[0]
                raise InputError(f"TF_CONFIG does not work: {reason}") from error
        elif name == "mirrored":
            self.strategy = tf.distribute.MirroredStrategy(_local_devices())
        elif len(tf.config.list_logical_devices("GPU")) > 1:
            self.strategy = tf.distribute.MirroredStrategy()
        else:
            self.strategy = tf.distribute.get_strategy()
        self.replicas = self.strategy.num_replicas_in_sync
        self.workers, self.worker = 1, 0
        resolver = self.strategy.cluster_resolver
        if resolver is not None and resolver.task_id is not None:
            self.workers, self.worker = max(several, 1), int(resolver.task_id)
            if resolver.task_type == "worker" and "chief" in resolver.cluster_spec().jobs:
                self.worker += 1

    @property
    def is_chief(self) -> bool:
        """Whether this process writes."""
        return self.worker == 0

    @property
    def local_replicas(self) -> int:
        """Devices of this process."""
        return self.replicas // self.workers

    def place(self, values: Any) -> Any:
        """This worker's share of a batch, for `strategy.run`: a part for each of its devices.

        Args:
            values: arrays or tensors, nested; rows are divided in equal parts.
        """
        if self.replicas == 1:
            return values
        parts, first = self.local_replicas, self.worker * self.local_replicas

        def part(context: Any) -> Any:
            number = context.replica_id_in_sync_group - first

            def cut(value: Any) -> Any:
                rows = len(value) // parts
                return tf.constant(value[number * rows : (number + 1) * rows])

            return tf.nest.map_structure(cut, values)

        return self.strategy.experimental_distribute_values_from_function(part)

    def all(self, value: float) -> np.ndarray:
        """The numbers of all workers, `(workers,)`; every worker must call it."""
        if self.workers == 1:
            return np.array([float(value)])
        mine = np.zeros(self.workers, np.float64)
        mine[self.worker] = value / self.local_replicas
        given = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(mine)
        )
        return self._sum(given).numpy()

    def chiefs(self, value: float) -> float:
        """The chief's number; every worker must call it."""
        return float(self.all(value)[0])

    @functools.cached_property
    def _sum(self) -> Callable[[Any], Any]:
        strategy = self.strategy

        def each(value: Any) -> Any:
            context = tf.distribute.get_replica_context()
            # What is passed in has no device, and is not summed without one.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

        def summed(values: Any) -> Any:
            return strategy.experimental_local_results(strategy.run(each, (values,)))[0]

        return cast(Callable[[Any], Any], tf.function(summed, autograph=False))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside, the loss of another worker is one clear line.

        Raises:
            InputError: another process of the team cannot be reached any more.
        """
        try:
            yield
        except LOST as error:
            if self.workers == 1:
                raise
            reason = str(error).splitlines()[0][:200]
            raise InputError(
                f"worker {self.worker} of {self.workers} lost another one and stopped; give the "
                f"same command with --resume on every machine ({reason})"
            ) from error


def _workers(config: str) -> int:
    """How many processes a `TF_CONFIG` lists; 0 if it lists none."""
    try:
        cluster = json.loads(config or "{}").get("cluster", {})
        return sum(len(cluster.get(kind, ())) for kind in ("chief", "worker"))
    except (ValueError, AttributeError, TypeError):
        return 0


def _local_devices() -> list[str]:
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return [device.name for device in tf.config.list_logical_devices(kind)]
