"""One file a workload; `mezzo.bench.workload.WORKLOADS` lists them."""
