//! The certificate: a proof, pass by pass, that a compilation kept what a training step computes.

mod algebra;
mod choice;
mod chunks;
mod compare;
mod definition;
mod explain;
pub mod gradient;
mod index;
mod integer;
mod lemmas;
mod mask;
mod name;
mod operation;
mod order;
mod part;
mod reading;
mod rounding;
pub mod step;
mod steps;
mod substitute;
mod tasks;
mod term;
#[cfg(test)]
mod tests;
mod truth;
mod unstated;

pub use compare::{Comparer, Difference, key_of, on_large_stack};
pub use reading::Ranks;
pub use rounding::{Roundings, kept_wide, roundings};
pub use tasks::Tasks;
pub use unstated::Unstated;
