//! Text output: quantities, tables, launches and diagnostics.

pub(crate) mod launches;
mod messages;
mod quantity;
mod shell;
mod table;

pub use messages::print;
pub(crate) use quantity::{bytes, seconds};
pub(crate) use shell::quoted;
pub(crate) use table::table;
