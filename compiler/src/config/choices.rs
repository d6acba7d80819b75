//! The words that keys of the configuration accept, as types.

pub use frit_ir::plan::{DeviceType, Strategy};

frit_ir::choices! {
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

    /// What is minimized.
    LossKind {
        /// Cross-entropy of class indices.
        CrossEntropy = "cross_entropy",
        /// Mean squared error.
        Mse = "mse",
        /// Mean absolute error.
        L1 = "l1",
        /// Mean squared error where it is small, mean absolute error elsewhere.
        SmoothL1 = "smooth_l1",
        /// Binary cross-entropy of the sigmoid.
        BceWithLogits = "bce_with_logits",
        /// Kullback-Leibler divergence of the softmax from probabilities.
        Kl = "kl",
        /// The model's own loss output.
        Output = "output",
        /// Nothing: forward only.
        None = "none",
    }

    /// What the labels of a cross-entropy are.
    Targets {
        /// The index of the class.
        Indices = "indices",
        /// The probability of every class.
        Probabilities = "probabilities",
    }

    /// Over what the loss is averaged.
    Reduction {
        /// All labels of the step.
        GlobalMean = "global_mean",
        /// The labels of each rank and micro-step, then those means.
        RankMean = "rank_mean",
    }

    /// What rests in host memory.
    Offload {
        /// Nothing.
        None = "none",
        /// Optimizer state.
        Optimizer = "optimizer",
        /// Optimizer state and parameters.
        Parameters = "parameters",
        /// What the budget asks for.
        Auto = "auto",
    }

    /// The update rule.
    Optimizer {
        /// Adam with decoupled weight decay.
        Adamw = "adamw",
        /// Adam.
        Adam = "adam",
        /// Gradient descent.
        Sgd = "sgd",
        /// Gradient descent with momentum.
        Momentum = "momentum",
        /// Gradient descent with Nesterov's momentum.
        Nesterov = "nesterov",
        /// Lion.
        Lion = "lion",
        /// Adafactor.
        Adafactor = "adafactor",
    }

    /// How the learning rate changes.
    Schedule {
        /// Not at all after the warm-up.
        Constant = "constant",
        /// Linearly to `min_lr`.
        Linear = "linear",
        /// Along a half cosine to `min_lr`.
        Cosine = "cosine",
        /// By the factor `gamma` every `step_size` steps.
        Step = "step",
        /// Up, then down below where it began.
        OneCycle = "one_cycle",
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

    /// When backward gathers the next unit.
    Backward {
        /// Before the current unit's gradients.
        Pre = "pre",
        /// After the current unit's gradients.
        Post = "post",
        /// When it is needed.
        None = "none",
    }

    /// Whether matrix sizes are padded.
    Padding {
        /// Where the cost model says that it pays.
        Auto = "auto",
        /// Wherever a size is not aligned.
        Always = "always",
        /// Nowhere.
        Never = "never",
    }

    /// Which activations backward computes again.
    Recompute {
        /// None.
        None = "none",
        /// All inside each repeated block.
        Unit = "unit",
        /// The cheap ones.
        Selective = "selective",
        /// As many as the memory budget asks for.
        Auto = "auto",
    }
}
