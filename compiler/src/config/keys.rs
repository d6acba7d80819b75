//! Rows of the key table.

use super::kind::{Kind, Value};
use super::sections::KEYS;

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Dotted name.
    pub name: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// The default, as TOML.
    pub default: &'static str,
    /// Its meaning, as a sentence.
    pub doc: &'static str,
}

/// The row of this name.
pub(super) fn find(name: &str) -> Option<&'static Key> {
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

    /// Its meaning, followed by the values that it accepts.
    pub(super) fn phrase(&self) -> String {
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
pub(super) fn sections() -> impl Iterator<Item = (&'static str, &'static [Key])> {
    KEYS.chunk_by(|a, b| a.split().0 == b.split().0).map(|keys| (keys[0].split().0, keys))
}
