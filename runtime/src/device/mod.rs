//! Where tasks run.

pub mod cpu;
pub mod cuda;

use crate::RunError;

/// One rank's device: its arenas, and the tasks of a plan made ready to run on it.
pub trait Device {
    /// Runs the tasks `begin..end` of the plan, in an order that respects their waits.
    ///
    /// # Errors
    /// The task that failed.
    fn run(&mut self, begin: usize, end: usize) -> Result<(), RunError>;

    /// Writes bytes into a buffer.
    fn write(&mut self, buffer: usize, offset: usize, bytes: &[u8]);

    /// Reads bytes of a buffer.
    fn read(&self, buffer: usize, offset: usize, bytes: usize) -> Vec<u8>;
}
