//! Enumerations of a plan: target device, sharding strategy, phases and metrics.

crate::choices! {
    /// The kind of device that a plan runs on.
    DeviceType {
        /// The CPU.
        Cpu = "cpu",
        /// NVIDIA GPUs.
        Cuda = "cuda",
    }

    /// The tensors that are sharded over ranks.
    Strategy {
        /// Parameters, gradients and optimizer state (FSDP, ZeRO-3).
        FullShard = "full_shard",
        /// Gradients and optimizer state; parameters stay gathered between forward and backward (ZeRO-2).
        ShardGradOp = "shard_grad_op",
        /// Optimizer state; parameters are gathered and gradients reduced once per step (ZeRO-1).
        ShardOptimizer = "shard_optimizer",
        /// Nothing; gradients are averaged by all-reduce (DDP).
        NoShard = "no_shard",
        /// Everything within groups of ranks, which are replicas of each other (HSDP).
        HybridShard = "hybrid_shard",
    }

    /// A part of a step, in the order in which they run, or the one part of an evaluation.
    PhaseName {
        /// Runs once: gathers parameters for all micro-steps.
        Unshard = "unshard",
        /// Runs `accumulation` times: forward and backward.
        MicroStep = "micro_step",
        /// Runs once: reduces gradients after the last micro-step.
        Reduce = "reduce",
        /// Runs once: the optimizer.
        Update = "update",
        /// Runs the model forward only.
        Eval = "eval",
    }

    /// A scalar that is reported after the update.
    MetricName {
        /// The mean loss of the step.
        Loss = "loss",
        /// The norm of all gradients before they are clipped.
        GradNorm = "grad_norm",
        /// The learning rate.
        Lr = "lr",
        /// The loss scale of the step.
        LossScale = "loss_scale",
        /// Not 0 if a gradient is not finite and the step was skipped.
        FoundInf = "found_inf",
        /// The elements over which the loss is averaged.
        Tokens = "tokens",
    }
}

impl Strategy {
    /// Ranks that hold one copy of what is sharded together; `group` of them under `hybrid_shard`.
    pub fn shards(self, world_size: usize, group: usize) -> usize {
        match self {
            Strategy::NoShard => 1,
            Strategy::HybridShard => group,
            _ => world_size,
        }
    }
}
