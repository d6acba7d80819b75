//! Exchange between ranks.

pub mod launch;
pub mod local;
pub mod rendezvous;
pub mod tcp;

use crate::RunError;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::Team;

/// The collectives of one rank. All ranks must call the same ones in the same order, each with the team it
/// is in; teams of one call have the same size.
pub trait Communicator {
    /// This rank.
    fn rank(&self) -> usize;

    /// Writes every team member's `send`, in rank order, to `recv`.
    ///
    /// # Safety
    /// `send` has `bytes` bytes, `recv` that many for every member; they do not overlap.
    ///
    /// # Errors
    /// If another rank failed.
    unsafe fn all_gather(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
    ) -> Result<(), RunError>;

    /// Combines every team member's `send`; this rank receives its part of `len` elements.
    ///
    /// # Safety
    /// `send` has `len` f32 for every member, `recv` has `len`; they do not overlap.
    ///
    /// # Errors
    /// If another rank failed.
    unsafe fn reduce_scatter(
        &self,
        team: Team,
        send: *const f32,
        recv: *mut f32,
        len: usize,
        reduce: ReduceKind,
    ) -> Result<(), RunError>;

    /// Combines every team member's `send`, for every one of them.
    ///
    /// # Safety
    /// Both have `len` f32; they are the same or do not overlap.
    ///
    /// # Errors
    /// If another rank failed.
    unsafe fn all_reduce(
        &self,
        team: Team,
        send: *const f32,
        recv: *mut f32,
        len: usize,
        reduce: ReduceKind,
    ) -> Result<(), RunError>;

    /// Every rank's bytes, in rank order, on rank 0; nothing on others. Not one of the plan's collectives.
    ///
    /// # Errors
    /// If another rank failed.
    fn gather(&self, send: &[u8]) -> Result<Vec<u8>, RunError>;

    /// The largest of every rank's `value`: how ranks agree outside the plan.
    ///
    /// # Errors
    /// If another rank failed.
    fn largest(&self, value: u64) -> Result<u64, RunError>;

    /// Tells the other ranks that this one cannot go on.
    fn abort(&self);
}
