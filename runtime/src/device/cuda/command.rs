//! Commands that a task enqueues, with all addresses resolved, and choices that are decided by measurement.

use super::tuning::Settled;
use frit_cuda::driver::{Address, Arguments, Collective, FunctionHandle, GemmAddresses, Shape};

/// One command enqueued on a stream.
#[derive(Clone, Debug)]
pub(super) enum Command {
    Launch {
        function: FunctionHandle,
        shape: Shape,
        arguments: Arguments,
    },
    /// A GEMM by its index in [`super::program::Program::GEMMs`].
    Multiply {
        problem: usize,
        at: GemmAddresses,
    },
    /// An operation of cuDNN by its number among those of all choices.
    Execute {
        operation: usize,
        at: Vec<Address>,
        workspace: Address,
    },
    /// Several ways to compute the same, by the index in [`super::program::Program::choices`]; none is left after
    /// [`settle`].
    Choice {
        choice: usize,
        candidates: Vec<Vec<Command>>,
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

/// Replaces choices by the candidates that were chosen.
pub(super) fn settle(commands: &mut Vec<Command>, chosen: &[Settled]) {
    let settled = commands.drain(..).flat_map(|command| match command {
        Command::Choice { choice, mut candidates } => {
            let mut candidate = candidates.swap_remove(chosen[choice].candidate);
            settle(&mut candidate, chosen);
            candidate
        }
        command => vec![command],
    });
    *commands = settled.collect();
}

impl Command {
    /// The index of its cuDNN operation, if it is one.
    pub(super) fn operation(&self) -> Option<usize> {
        if let Command::Execute { operation, .. } = self { Some(*operation) } else { None }
    }

    /// The GEMM that it is.
    pub(super) fn problem(&self) -> Option<usize> {
        if let Command::Multiply { problem, .. } = self { Some(*problem) } else { None }
    }

    /// Its kind, for counts.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Command::Launch { .. } => "kernel",
            Command::Multiply { .. } => "gemm",
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
            Command::Multiply { .. } | Command::Execute { .. } | Command::Choice { .. } => true,
            Command::Copy { to, from, bytes } => *bytes > 0 && to != from,
            Command::CopyIn { bytes, .. }
            | Command::CopyOut { bytes, .. }
            | Command::Zero { bytes, .. } => *bytes > 0,
            Command::Collective(collective) => collective.count > 0,
        }
    }
}
