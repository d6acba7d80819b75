//! Prints a configuration as TOML.

use super::field::Field;
use super::keys::sections;
use super::kind::Value;
use super::{Config, values};
use frit_passes::autocast::Override;
use frit_passes::update::ParamGroup;
use std::fmt::Write;

/// All values as TOML, in the order of the table.
pub(super) fn print(config: &Config) -> String {
    let values = values(config);
    let mut parts = Vec::new();
    for (section, keys) in sections() {
        let mut part = format!("[{section}]\n");
        for key in keys {
            if let Some(value) = values.get(key.name) {
                let _ = writeln!(part, "{} = {}", key.split().1, value.to_toml());
            }
        }
        parts.push(part);
        parts.extend(tables(config, section));
    }
    parts.join("\n")
}

/// The lists of tables of a section, as TOML.
fn tables(config: &Config, section: &str) -> Vec<String> {
    let table = |head: &str, rows: Vec<(&str, Option<Value>)>| {
        let rows = rows.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let rows: String = rows.map(|(name, v)| format!("{name} = {}\n", v.to_toml())).collect();
        format!("[[{head}]]\n{rows}")
    };
    let text = |text: &String| Value::Text(text.clone());
    match section {
        "optimizer" => {
            let group = |g: &ParamGroup| {
                table(
                    "optimizer.group",
                    vec![
                        ("scope", Some(text(&g.scope))),
                        ("lr", g.lr.map(Value::Number)),
                        ("weight_decay", g.weight_decay.map(Value::Number)),
                        ("kind", g.kind.map(|kind| kind.put())),
                    ],
                )
            };
            config.optimizer.groups.iter().map(group).collect()
        }
        "precision" => {
            let exception = |o: &Override| {
                table(
                    "precision.override",
                    vec![
                        ("scope", o.scope.as_ref().map(text)),
                        ("op", o.op.as_ref().map(text)),
                        ("dtype", Some(o.dtype.put())),
                        ("output", o.output.map(|d| d.put())),
                    ],
                )
            };
            config.precision.overrides.iter().map(exception).collect()
        }
        _ => vec![],
    }
}
