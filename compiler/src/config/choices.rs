//! Enumerated values used only by the configuration; those that passes use are defined there.

frit_ir::choices! {
    /// What trains beside a frozen model.
    AdapterKind {
        /// Nothing: the model itself trains.
        None = "none",
        /// Two matrices of low rank beside each chosen weight.
        Lora = "lora",
    }

    /// How BatchNorm computes its statistics.
    BatchNorm {
        /// As the model says.
        AsExported = "as_exported",
        /// From each rank's micro-batch.
        Train = "train",
        /// Over all ranks.
        Sync = "sync",
    }

    /// What parameters that do not train are held in.
    FrozenDtype {
        /// The dtype in which they are read, if there is only one.
        Compute = "compute",
        /// f32.
        Fp32 = "fp32",
    }

    /// The dtype of the residual stream.
    Residual {
        /// f32.
        Fp32 = "fp32",
        /// That of `precision.compute`.
        Compute = "compute",
    }

    /// The kind of labels of a cross-entropy.
    Targets {
        /// The index of the class.
        Indices = "indices",
        /// The probability of every class.
        Probabilities = "probabilities",
    }

    /// The elements over which the loss is averaged.
    Reduction {
        /// All labels of the step.
        GlobalMean = "global_mean",
        /// The labels of each rank and micro-step, then those means.
        RankMean = "rank_mean",
    }

    /// Which parameters weight decay applies to.
    Decay {
        /// All.
        All = "all",
        /// Those of two axes and more: neither norms nor biases.
        Matrices = "matrices",
    }

    /// Who decides when units are gathered.
    Prefetch {
        /// The keys that count units.
        Fixed = "fixed",
        /// The cost model.
        Auto = "auto",
    }
}
