//! The table of keys: its rows, how they are read, and the texts that are made of it.

use super::field::Field;
use super::kind::{Kind, Value};
use super::sections::KEYS;
use super::{Config, Values};
use frit_passes::autocast::Override;
use frit_passes::update::ParamGroup;
use std::fmt::Write;

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Dotted name.
    pub name: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// The default, as TOML.
    pub default: &'static str,
    /// What it means, as a sentence.
    pub doc: &'static str,
}

/// The row of this name.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|k| k.name == name)
}

impl Key {
    /// Its section, and its name within that.
    pub fn split(&self) -> (&'static str, &'static str) {
        self.name.split_once('.').unwrap_or(("", self.name))
    }

    /// The default value.
    pub(super) fn default(&self) -> Value {
        let table: toml::Table =
            format!("x = {}", self.default).parse().expect("invariant: defaults are TOML");
        self.read(&table["x"]).expect("invariant: defaults have their key's type")
    }

    /// The value, if it is of the key's kind.
    ///
    /// # Errors
    /// What was expected.
    pub fn read(&self, value: &toml::Value) -> Result<Value, String> {
        self.kind
            .read(value)
            .ok_or_else(|| format!("`{}` must be {}, not {value}", self.name, self.kind.describe()))
    }

    /// What it means, to stand before what values it takes.
    fn phrase(&self) -> String {
        let sentence = self.doc.trim().trim_end_matches('.');
        let mut letters = sentence.chars();
        match (letters.next(), letters.next()) {
            (Some(first), Some(second)) if second.is_lowercase() || second == ' ' => {
                let rest = &sentence[first.len_utf8()..];
                format!("{}{rest}", first.to_lowercase())
            }
            _ => sentence.into(),
        }
    }
}

/// The keys by section, in order.
fn sections() -> impl Iterator<Item = (&'static str, &'static [Key])> {
    KEYS.chunk_by(|a, b| a.split().0 == b.split().0).map(|keys| (keys[0].split().0, keys))
}

/// A list of tables, whose entries have keys of their own.
struct Table {
    name: &'static str,
    keys: &'static str,
    doc: &'static str,
}

const TABLES: [Table; 2] = [
    Table {
        name: "precision.override",
        keys: "scope = \"h.*.attn\", op = \"softmax\" or both, and dtype = \"fp32\"",
        doc: "computes what the pattern covers in another dtype; output = \"fp32\" is the dtype of its results, if it is \
              another; the last that covers a node wins",
    },
    Table {
        name: "optimizer.group",
        keys: "scope = \"h.*.mlp.**\", and lr = 1e-4 or weight_decay = 0.0 or both",
        doc: "settings of the parameters that the pattern covers by their name or by the scope that holds them; the \
              last that covers a parameter wins",
    },
];

/// `docs/configuration.md`.
pub fn page() -> String {
    let mut out = String::from(PAGE);
    let cell = |text: &str| text.replace('|', "\\|");
    for (section, keys) in sections() {
        let _ = write!(
            out,
            "\n## `[{section}]`\n\n| key | default | value | meaning |\n|---|---|---|---|\n"
        );
        for key in keys {
            let (name, kind, doc) = (key.split().1, key.kind.describe(), key.doc.trim());
            let _ =
                writeln!(out, "| `{name}` | `{}` | {} | {} |", key.default, cell(&kind), cell(doc));
        }
    }
    for table in TABLES {
        let _ = write!(out, "\n## `[[{}]]`\n\n`{}`: {}.\n", table.name, table.keys, table.doc);
    }
    out
}

const PAGE: &str = "# Configuration

A configuration is a TOML file, `frit compile --config train.toml`, and settings of single keys that come after it, `--set
section.key=VALUE`. Keys that neither names keep their defaults; `frit compile --help-config` prints this list. The resolved
configuration is kept in the plan directory as `source/train.toml`.

This page is written from the declarations in `compiler/src/config/sections.rs` (`FRIT_BLESS=1 cargo test -p frit page`).
";

/// The text of `--help-config`.
pub fn help() -> String {
    let mut out = String::from("Keys of train.toml and --set key=value, with their defaults:\n");
    for (section, keys) in sections() {
        let _ = write!(out, "\n[{section}]\n");
        for key in keys {
            let (name, default, kind) = (key.split().1, key.default, key.kind.describe());
            let _ = writeln!(out, "  {name} = {default}\n      {}: {kind}", key.phrase());
        }
    }
    for table in TABLES {
        let _ = write!(out, "\n[[{}]]\n  {}\n      {}\n", table.name, table.keys, table.doc);
    }
    out
}

/// All values as TOML, in the order of the table.
pub(super) fn print(config: &Config, values: &Values) -> String {
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
