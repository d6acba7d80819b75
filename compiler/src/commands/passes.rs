//! `frit passes`: lists the passes in order, with their contracts.

use crate::config::Config;
use crate::diagnostics::Report;
use crate::pipeline::{self, Options};
use crate::render::table;
use frit_passes::PassInfo;

/// Arguments of `frit passes`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit passes
  frit compile model.onnx --disable-pass simplify -o plan")]
pub struct Args {}

/// Runs it.
pub(super) fn execute(_: &Args) -> Result<String, Report> {
    let rows: Vec<Vec<String>> = infos()
        .iter()
        .map(|i| vec![i.name.into(), format!("{:?}", i.numerics), i.summary.into()])
        .collect();
    Ok(table(&["pass", "numbers", "what it does"], &rows))
}

/// The contracts of all passes, in order.
pub(crate) fn infos() -> Vec<&'static PassInfo> {
    let options =
        Options::new(&Config::default()).expect("invariant: the defaults are implemented");
    pipeline::contracts(&options, true)
}
