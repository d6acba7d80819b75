//! The examples of each step: epochs of global batches of (per-rank batch) × ranks × accumulation examples, in file order
//! or shuffled per epoch.

use crate::checkpoint::Position;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How examples are assigned to steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deal {
    pub(super) examples: usize,
    pub(super) ranks: usize,
    pub(super) accumulation: usize,
    pub(super) batch: usize,
    /// Whether the rest of an epoch after its last full step forms a smaller step.
    pub(super) keep_rest: bool,
}

/// The position of a step in the data.
pub(super) struct Place {
    pub(super) epoch: usize,
    /// First example within the epoch's order.
    pub(super) first: usize,
    pub(super) micro_steps: usize,
}

impl Deal {
    /// Examples of one step over all ranks.
    pub(super) fn global_batch(&self) -> usize {
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

    pub(super) fn place(&self, step: usize) -> Place {
        let (global, steps) = (self.global_batch(), self.steps_per_epoch());
        let at = step % steps;
        let is_full = (at + 1) * global <= self.examples;
        let micro_steps = if is_full { self.accumulation } else { self.rest() };
        Place { epoch: step / steps, first: at * global, micro_steps }
    }

    pub(super) fn step_at(&self, position: Position) -> usize {
        let steps = self.steps_per_epoch();
        position.epoch * steps + (position.example / self.global_batch()).min(steps - 1)
    }
}

/// A Fisher-Yates permutation of `0..n`.
pub(super) fn shuffled(n: usize, seed: u64, epoch: usize) -> Vec<usize> {
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    random.set_stream(epoch as u64);
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        // The bias of the remainder is below n / 2⁶⁴.
        order.swap(i, (random.next_u64() % (i as u64 + 1)) as usize);
    }
    order
}
