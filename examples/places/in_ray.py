"""python examples/places/in_ray.py: one rank in each actor, by the calls of ray.util.collective."""

import numpy as np
import ray

from flagcx.interop import ray as collective


@ray.remote(num_cpus=0)
class Worker:
    def fit(self, steps=60):
        rank, size = collective.get_rank(), collective.get_collective_group_size()
        data = np.random.default_rng(rank).standard_normal((1000, 3))
        target, weights = data @ [1.0, -2.0, 0.5], np.zeros(3)
        for _ in range(steps):
            slope = data.T @ (data @ weights - target) / len(data) / size
            collective.allreduce(slope)
            weights -= 0.2 * slope
        return size, weights.round(3).tolist()


if __name__ == "__main__":
    ray.init(include_dashboard=False)
    workers = [Worker.remote() for _ in range(4)]
    collective.create_collective_group(workers, 4, [0, 1, 2, 3])
    for size, weights in ray.get([worker.fit.remote() for worker in workers]):
        print(size, weights)
