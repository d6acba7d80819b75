//! Configuration: `train.toml` and `--set`.
//!
//! Every key is declared once, in `sections.rs`. The typed [`Config`] and the table [`KEYS`] are generated from it; parsing,
//! `--set`, unknown-key errors, `--help-config`, docs/configuration.md, the JSON Schema and printing use the table.

mod check;
pub mod choices;
mod declare;
mod field;
mod help;
mod keys;
mod kind;
pub mod losses;
mod print;
mod read;
mod schema;
mod sections;
mod unused;

pub use field::LossScale;
pub use help::{help, page};
pub use keys::Key;
pub use kind::{Kind, Value};
pub use schema::json_schema;
pub use sections::*;

use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic};
use read::Read;
use std::collections::BTreeMap;
use std::path::Path;
use unused::Written;

/// Values of keys, by name.
type Values = BTreeMap<&'static str, Value>;

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
                    Diagnostic::error(Code::ConfigUnreadable, format!("cannot read {name}: {e}"))
                        .help(
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
        let mut values: Values = KEYS.iter().map(|key| (key.name, key.default())).collect();
        let (mut report, mut written) = (Report::default(), Written::new());
        let mut read = Read { values: &mut values, written: &mut written, report: &mut report };
        let tables = read::file(text, name, &mut read);
        read::settings(sets, &mut read);
        for (word, key) in [(PURE, "precision.pure"), (FP8, "precision.fp8")] {
            if values.get("precision.compute") == Some(&Value::Text(word.into())) {
                values.insert("precision.compute", Value::Text("bf16".into()));
                values.insert(key, Value::Boolean(true));
            }
        }
        report.or(())?;
        let mut config = typed(&values).expect("invariant: values have the types of their keys");
        (config.precision.overrides, config.optimizer.groups) = (tables.overrides, tables.groups);
        config.unused = unused::find(&config, &written, &values);
        check::check(&config).or(config)
    }

    /// All keys with their values, as TOML in a stable order; reading it gives this configuration.
    pub fn to_toml(&self) -> String {
        print::print(self)
    }

    /// Micro-steps of a step on each rank.
    pub fn accumulation(&self) -> usize {
        let divided = |pieces: usize| pieces / self.sharding.ranks;
        self.run.reproducible.map_or(self.run.accumulation, divided)
    }

    /// Every key whose value is a number, with it.
    pub fn numbers(&self) -> BTreeMap<&'static str, f64> {
        let number = |(key, value): (&'static str, Value)| match value {
            Value::Number(x) => Some((key, x)),
            Value::Integer(n) => Some((key, n as f64)),
            _ => None,
        };
        values(self).into_iter().filter_map(number).collect()
    }
}

impl Default for Config {
    fn default() -> Self {
        Config::parse("", "", &[]).expect("invariant: the defaults are valid")
    }
}

#[cfg(test)]
mod tests;
