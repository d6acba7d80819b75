//! The examples of each step: epochs of global batches of (per-rank batch) × ranks × accumulation examples, in file order
//! or shuffled per epoch.

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// The position in the data: the first example of the next step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Epochs that are complete.
    pub epoch: usize,
    /// Examples of this epoch that were read.
    pub example: usize,
}

/// How examples are assigned to steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deal {
    pub(crate) examples: usize,
    pub(crate) ranks: usize,
    pub(crate) accumulation: usize,
    pub(crate) batch: usize,
    /// Whether the rest of an epoch after its last full step forms a smaller step.
    pub(crate) keep_rest: bool,
}

/// The position of a step in the data.
pub(crate) struct Place {
    pub(crate) epoch: usize,
    /// First example within the epoch's order.
    pub(crate) first: usize,
    pub(crate) micro_steps: usize,
}

impl Deal {
    /// Examples of one step over all ranks.
    pub(crate) fn global_batch(&self) -> usize {
        self.batch * self.ranks * self.accumulation
    }

    /// Micro-steps filled by the examples after the last full step of an epoch, if they are kept.
    fn rest(&self) -> usize {
        let rest = self.examples % self.global_batch() / (self.batch * self.ranks);
        if self.keep_rest { rest } else { 0 }
    }

    fn steps_per_epoch(&self) -> usize {
        self.examples / self.global_batch() + usize::from(self.rest() > 0)
    }

    pub(crate) fn place(&self, step: usize) -> Place {
        let (global, steps) = (self.global_batch(), self.steps_per_epoch());
        let at = step % steps;
        let is_full = (at + 1) * global <= self.examples;
        let micro_steps = if is_full { self.accumulation } else { self.rest() };
        Place { epoch: step / steps, first: at * global, micro_steps }
    }

    /// A position beyond the examples that an epoch reads is one in the epochs after it: a trainer that is fed batch by
    /// batch counts examples only.
    pub(crate) fn step_at(&self, position: Position) -> usize {
        let (global, steps) = (self.global_batch(), self.steps_per_epoch());
        let read = match self.rest() {
            0 => steps * global,
            rest => (steps - 1) * global + rest * self.batch * self.ranks,
        };
        let epoch = position.epoch + position.example / read;
        epoch * steps + position.example % read / global
    }
}

/// A Fisher-Yates permutation of `0..n`.
pub(crate) fn shuffled(n: usize, seed: u64, epoch: usize) -> Vec<usize> {
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    random.set_stream(epoch as u64);
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        // The bias of the remainder is below n / 2⁶⁴.
        order.swap(i, (random.next_u64() % (i as u64 + 1)) as usize);
    }
    order
}
