//! `frit passes`: lists the passes in order, with their contracts.

use crate::config::Config;
use crate::config::choices::AdapterKind;
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

/// The contracts of all passes, in order, with those that run only if they are configured.
pub(crate) fn infos() -> Vec<&'static PassInfo> {
    let mut config = Config::default();
    config.adapter.kind = AdapterKind::Lora;
    config.adapter.targets = vec!["**".into()];
    config.data.document_separator = Some(0);
    let options = Options::new(&config).expect("invariant: this is implemented");
    pipeline::contracts(&options, true)
}
