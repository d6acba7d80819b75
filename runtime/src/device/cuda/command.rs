//! Commands that a task enqueues, with all addresses resolved, and choices that are decided by measurement.

use frit_cuda::driver::{Address, Arguments, Collective, FunctionHandle, ProductAddresses, Shape};

/// One command enqueued on a stream.
#[derive(Clone, Debug)]
pub(super) enum Command {
    Launch {
        function: FunctionHandle,
        shape: Shape,
        arguments: Arguments,
    },
    /// A GEMM by its index in [`super::program::Program::products`].
    Multiply {
        product: usize,
        at: ProductAddresses,
    },
    /// A GEMM with an epilogue, and the fallback if there is no algorithm for it; none remains after
    /// [`settle_products`].
    Fused {
        product: usize,
        at: ProductAddresses,
        fallback: Vec<Command>,
    },
    /// An operation of cuDNN by its index in [`super::program::Program::operations`].
    Execute {
        operation: usize,
        at: Vec<Address>,
        workspace: Address,
    },
    /// A cuDNN operation with the commands around it, and its fallback; none remains after [`settle_operations`].
    Choice {
        operation: usize,
        candidate: Vec<Command>,
        fallback: Vec<Command>,
    },
    Copy {
        to: Address,
        from: Address,
        bytes: usize,
    },
    /// From pinned host memory.
    CopyIn {
        to: Address,
        from: *mut u8,
        bytes: usize,
    },
    /// To pinned host memory.
    CopyOut {
        to: *mut u8,
        from: Address,
        bytes: usize,
    },
    Zero {
        at: Address,
        bytes: usize,
    },
    Collective(Collective),
}

/// Decides which GEMMs keep their epilogue.
pub(super) fn settle_products(commands: &mut Vec<Command>, has_algorithm: &impl Fn(usize) -> bool) {
    let settled = commands.drain(..).flat_map(|command| match command {
        Command::Fused { product, at, .. } if has_algorithm(product) => {
            vec![Command::Multiply { product, at }]
        }
        Command::Fused { mut fallback, .. } => {
            settle_products(&mut fallback, has_algorithm);
            fallback
        }
        Command::Choice { operation, mut candidate, mut fallback } => {
            settle_products(&mut candidate, has_algorithm);
            settle_products(&mut fallback, has_algorithm);
            vec![Command::Choice { operation, candidate, fallback }]
        }
        command => vec![command],
    });
    *commands = settled.collect();
}

/// Decides which operations cuDNN computes.
pub(super) fn settle_operations(commands: &mut Vec<Command>, has_engine: &impl Fn(usize) -> bool) {
    let settled = commands.drain(..).flat_map(|command| match command {
        Command::Choice { operation, candidate, .. } if has_engine(operation) => candidate,
        Command::Choice { fallback, .. } => fallback,
        command => vec![command],
    });
    *commands = settled.collect();
}

impl Command {
    /// The index of its cuDNN operation, if it is one.
    pub(super) fn operation(&self) -> Option<usize> {
        if let Command::Execute { operation, .. } = self { Some(*operation) } else { None }
    }

    /// Its kind, for statistics.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Command::Launch { .. } => "kernel",
            Command::Multiply { .. } | Command::Fused { .. } => "product",
            Command::Execute { .. } | Command::Choice { .. } => "operation",
            Command::Copy { .. } => "copy",
            Command::CopyIn { .. } | Command::CopyOut { .. } => "host copy",
            Command::Zero { .. } => "zero",
            Command::Collective(_) => "collective",
        }
    }

    /// Whether there is anything to enqueue; the driver refuses empty copies and launches.
    pub(super) fn does_something(&self) -> bool {
        match self {
            Command::Launch { shape, .. } => !shape.grid.contains(&0) && shape.block > 0,
            Command::Multiply { .. }
            | Command::Fused { .. }
            | Command::Execute { .. }
            | Command::Choice { .. } => true,
            Command::Copy { to, from, bytes } => *bytes > 0 && to != from,
            Command::CopyIn { bytes, .. }
            | Command::CopyOut { bytes, .. }
            | Command::Zero { bytes, .. } => *bytes > 0,
            Command::Collective(collective) => collective.count > 0,
        }
    }
}
