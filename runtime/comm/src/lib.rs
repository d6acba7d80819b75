//! Communication between ranks: the collectives of a plan, and agreement outside of plans. It depends on no plan and no
//! device.

mod door;
mod element;
pub mod error;
pub mod identity;
pub mod launch;
pub mod local;
#[cfg(feature = "mpi")]
mod mpi;
pub mod processes;
pub mod rendezvous;
pub mod secret;
mod tcp;
mod tree;

pub use error::CommError;

use frit_ir::DType;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::Team;

/// The collectives of one rank. All ranks must call the same ones in the same order, each with its own team; the teams
/// of a call have equal sizes. Operands are f32, f16 or bf16.
pub trait Communicator {
    /// This rank.
    fn rank(&self) -> usize;

    /// Writes every team member's `send`, in rank order, to `recv`.
    ///
    /// # Safety
    /// `send` must have `bytes` bytes, `recv` that many for every member; they must not overlap.
    ///
    /// # Errors
    /// If another rank failed.
    unsafe fn all_gather(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
    ) -> Result<(), CommError>;

    /// Combines every team member's `send`; this rank receives its part.
    ///
    /// # Safety
    /// `send` must have `elements` for every member, `recv` for one; they must not overlap.
    ///
    /// # Errors
    /// If another rank failed.
    unsafe fn reduce_scatter(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        elements: (usize, DType),
        reduce: ReduceKind,
    ) -> Result<(), CommError>;

    /// Combines every team member's `send`, for every one of them.
    ///
    /// # Safety
    /// Both must have `elements`; they must be equal or not overlap.
    ///
    /// # Errors
    /// If another rank failed.
    unsafe fn all_reduce(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        elements: (usize, DType),
        reduce: ReduceKind,
    ) -> Result<(), CommError>;

    /// Gathers every rank's bytes, in rank order, on rank 0; empty on others. Not one of the plan's collectives.
    ///
    /// # Errors
    /// If another rank failed.
    fn gather(&self, send: &[u8]) -> Result<Vec<u8>, CommError>;

    /// The maximum of `value` over ranks, for agreement outside the plan.
    ///
    /// # Errors
    /// If another rank failed.
    fn largest(&self, value: u64) -> Result<u64, CommError>;

    /// Tells the other ranks that this one cannot continue.
    fn abort(&self);
}
