//! What a training step is: the loss, and the update of one rank, stated from the configuration.
//!
//! The statements are graphs themselves, written here from the definitions in `docs/training.md` and `docs/configuration.md`, not from
//! what the passes `loss`, `loss_scale` and `update` do. [`with_loss`] states what training minimizes, [`updated`] what a micro-step
//! leaves to the next one and what an update replaces. They agree with a pass if the outputs of the same name and kind are equal over the
//! real numbers; in which dtype values are held, in which order they are added and where nodes stand is nothing that they state.

mod buffers;
mod hidden;
mod loss;
mod optimizer;
mod reproducible;
#[cfg(test)]
mod tests;
mod update;
mod writer;

pub use hidden::matrices;
pub use loss::{LossKind, LossTerm, with_loss};
pub use optimizer::Group;
pub use update::{Update, updated};
