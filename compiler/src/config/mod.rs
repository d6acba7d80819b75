//! Configuration: `train.toml` and `--set`.
//!
//! Every key is one row of the [`keys`] table, from which parsing, `--set`, unknown-key errors,
//! `--help-config` and the resolved print-out come; [`Config`] is the typed view of the values.

pub mod choices;
pub mod keys;
mod read;
mod sections;

pub use keys::{KEYS, Key, Kind};
pub use sections::*;

use crate::diagnostics::Report;
use keys::Value;
use std::collections::BTreeMap;
use std::path::Path;

impl Config {
    /// Reads a configuration file, if one is given, then applies `key=value` settings in order. Keys
    /// that neither names keep their defaults.
    ///
    /// # Errors
    /// Every unknown key, wrong type and value out of range, with its place.
    pub fn load(path: Option<&Path>, sets: &[String]) -> Result<Config, Report> {
        let (text, name) = match path {
            None => (String::new(), String::new()),
            Some(path) => {
                let name = path.display().to_string();
                let text = std::fs::read_to_string(path).map_err(|e| {
                    frit_ir::Diagnostic::error("E050", format!("cannot read {name}: {e}")).help(
                        "give the path of a train.toml, or leave out --config for the defaults",
                    )
                })?;
                (text, name)
            }
        };
        Config::parse(&text, &name, sets)
    }

    /// The same for the text of a file called `name`.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, name: &str, sets: &[String]) -> Result<Config, Report> {
        let mut values: BTreeMap<&'static str, Value> =
            KEYS.iter().map(|key| (key.name, key.default())).collect();
        let mut report = Report::default();
        let lists = read::file(text, name, &mut values, &mut report);
        read::settings(sets, &mut values, &mut report);
        for (word, key) in [(keys::PURE, "precision.pure"), (keys::FP8, "precision.fp8")] {
            if values.get("precision.compute") == Some(&Value::Text(word.into())) {
                values.insert("precision.compute", Value::Text("bf16".into()));
                values.insert(key, Value::Boolean(true));
            }
        }
        report.or(())?;
        let config = sections::build(&values, lists)?;
        let report = sections::check(&config);
        report.or(config)
    }

    /// All keys with their values, as TOML in a stable order; reading it gives this configuration.
    pub fn to_toml(&self) -> String {
        keys::print(&sections::values(self), &self.precision.overrides, &self.optimizer.groups)
    }
}

impl Default for Config {
    fn default() -> Self {
        Config::parse("", "", &[]).expect("invariant: the defaults are valid")
    }
}

#[cfg(test)]
mod tests;
