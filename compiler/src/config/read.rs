//! Reading TOML text and `key=value` settings into the values of the key table.

use super::Override;
use super::keys::{KEYS, Value, dtype_name, find};
use crate::diagnostics::Report;
use frit_ir::Diagnostic;
use std::collections::BTreeMap;
use std::ops::Range;
use toml::de::{DeTable, DeValue};

type Values = BTreeMap<&'static str, Value>;

/// A file, to say where in it something is.
struct Source<'a> {
    text: &'a str,
    name: &'a str,
}

impl Source<'_> {
    /// `train.toml:3:5: `
    fn place(&self, span: Range<usize>) -> String {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        format!("{}:{line}:{column}: ", self.name)
    }
}

/// Reads the text of a file into `values`; what is wrong goes into the report.
pub(super) fn file(
    text: &str,
    name: &str,
    values: &mut Values,
    report: &mut Report,
) -> Vec<Override> {
    let source = Source { text, name };
    let mut overrides = Vec::new();
    let table = match DeTable::parse(text) {
        Ok(table) => table,
        Err(error) => {
            let place = source.place(error.span().unwrap_or(0..0));
            let message = format!("{place}{}", error.message());
            report.push(Diagnostic::error("E050", message).help("the file must be TOML"));
            return overrides;
        }
    };
    for (head, section) in table.get_ref() {
        let DeValue::Table(section) = section.get_ref() else {
            unknown(head.get_ref(), &source.place(head.span()), report);
            continue;
        };
        for (key, value) in section {
            let name = format!("{}.{}", head.get_ref(), key.get_ref());
            let place = source.place(key.span());
            if name == "precision.override" {
                match value.get_ref() {
                    DeValue::Array(list) => {
                        for entry in list {
                            let found = read_override(&source, entry.get_ref());
                            collect(found, &source.place(entry.span()), &mut overrides, report);
                        }
                    }
                    _ => report.push(Diagnostic::error(
                        "E051",
                        format!("{place}`precision.override` is a list of tables"),
                    )),
                }
                continue;
            }
            let Some(value) = plain(&source, value.span()) else {
                unknown(&name, &place, report);
                continue;
            };
            assign(&name, &value, &place, values, report);
        }
    }
    overrides
}

/// The value at a span, as a value of its own.
fn plain(source: &Source<'_>, span: Range<usize>) -> Option<toml::Value> {
    let text = source.text.get(span)?;
    let mut table: toml::Table = format!("x = {text}").parse().ok()?;
    table.remove("x").filter(|v| !v.is_table())
}

fn collect(
    found: Result<Override, String>,
    place: &str,
    overrides: &mut Vec<Override>,
    report: &mut Report,
) {
    match found {
        Ok(found) => overrides.push(found),
        Err(message) => report.push(
            Diagnostic::error("E051", format!("{place}{message}"))
                .help("write scope = \"h.*.attn\" or op = \"softmax\", and dtype = \"fp32\""),
        ),
    }
}

fn read_override(source: &Source<'_>, value: &DeValue<'_>) -> Result<Override, String> {
    let DeValue::Table(table) = value else {
        return Err("`precision.override` is a list of tables".into());
    };
    let mut found = Override { scope: None, op: None, dtype: String::new() };
    for (key, value) in table {
        let text = plain(source, value.span()).and_then(|v| v.as_str().map(String::from));
        let Some(text) = text else {
            return Err(format!("`{}` must be a text", key.get_ref()));
        };
        match key.get_ref().as_ref() {
            "scope" => found.scope = Some(text),
            "op" => found.op = Some(text),
            "dtype" => {
                let name = dtype_name(&text);
                found.dtype = name.ok_or_else(|| format!("`{text}` is no float type"))?.into();
            }
            other => return Err(format!("unknown key `{other}` of `precision.override`")),
        }
    }
    match (&found.scope, &found.op, found.dtype.is_empty()) {
        (Some(_), None, false) | (None, Some(_), false) => Ok(found),
        (_, _, true) => Err("`dtype` is missing".into()),
        _ => Err("give either `scope` or `op`".into()),
    }
}

/// Applies `key=value` settings; values are TOML, and a bare word is a text.
pub(super) fn settings(sets: &[String], values: &mut Values, report: &mut Report) {
    for set in sets {
        let Some((name, text)) = set.split_once('=') else {
            report.push(
                Diagnostic::error("E051", format!("--set {set}: there is no `=`"))
                    .help("write --set key=value, such as --set optimizer.lr=3e-4"),
            );
            continue;
        };
        let (name, text) = (name.trim(), text.trim());
        let place = format!("--set {name}: ");
        let parsed = format!("x = {text}").parse::<toml::Table>().ok();
        let value = parsed
            .and_then(|mut table| if table.len() == 1 { table.remove("x") } else { None })
            .unwrap_or_else(|| toml::Value::String(text.into()));
        assign(name, &value, &place, values, report);
    }
}

fn assign(name: &str, value: &toml::Value, place: &str, values: &mut Values, report: &mut Report) {
    let Some(key) = find(name) else {
        unknown(name, place, report);
        return;
    };
    match key.read(value) {
        Ok(value) => {
            values.insert(key.name, value);
        }
        Err(message) => report.push(Diagnostic::error("E051", format!("{place}{message}"))),
    }
}

fn unknown(name: &str, place: &str, report: &mut Report) {
    let nearest = KEYS.iter().map(|k| (distance(name, k.name), k.name)).min();
    let help = match nearest {
        Some((d, key)) if d <= 1 + name.len() / 4 => format!("did you mean `{key}`?"),
        _ => "`frit compile --help-config` lists all keys".into(),
    };
    report.push(Diagnostic::error("E052", format!("{place}unknown key `{name}`")).help(help));
}

/// Edit distance (Levenshtein 1966).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
