//! Reads TOML text and `key=value` settings into the values of the key table.

use super::Values;
use super::keys::find;
use super::kind::{GROUP_KINDS, Value, float_name};
use super::sections::KEYS;
use super::unused::Written;
use crate::diagnostics::Report;
use frit_ir::nearest::alike;
use frit_ir::ops::OptimizerKind;
use frit_ir::{Code, DType, Diagnostic};
use frit_passes::autocast::Override;
use frit_passes::update::ParamGroup;
use std::ops::Range;
use toml::de::{DeTable, DeValue};

/// What is read: the values of keys, where they were written, and errors.
pub(super) struct Read<'a> {
    pub(super) values: &'a mut Values,
    pub(super) written: &'a mut Written,
    pub(super) report: &'a mut Report,
}

/// The lists of tables of a file.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) overrides: Vec<Override>,
    pub(super) groups: Vec<ParamGroup>,
}

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

/// Reads the text of a file.
pub(super) fn file(text: &str, name: &str, read: &mut Read<'_>) -> Tables {
    let source = Source { text, name };
    let mut tables = Tables::default();
    let table = match DeTable::parse(text) {
        Ok(table) => table,
        Err(error) => {
            let place = source.place(error.span().unwrap_or(0..0));
            let message = format!("{place}{}", error.message());
            read.report.push(
                Diagnostic::error(Code::ConfigUnreadable, message).help("the file must be TOML"),
            );
            return tables;
        }
    };
    for (head, section) in table.get_ref() {
        let DeValue::Table(section) = section.get_ref() else {
            unknown(head.get_ref(), &source.place(head.span()), read.report);
            continue;
        };
        for (key, value) in section {
            let name = format!("{}.{}", head.get_ref(), key.get_ref());
            let place = source.place(key.span());
            if name == "precision.override" || name == "optimizer.group" {
                let DeValue::Array(list) = value.get_ref() else {
                    let message = format!("{place}`{name}` is a list of tables");
                    read.report.push(Diagnostic::error(Code::ConfigValue, message));
                    continue;
                };
                for entry in list {
                    let at = source.place(entry.span());
                    let found = match name.as_str() {
                        "precision.override" => read_override(&source, entry.get_ref())
                            .map(|found| tables.overrides.push(found))
                            .map_err(|message| (message, OVERRIDE)),
                        _ => read_group(&source, entry.get_ref())
                            .map(|found| tables.groups.push(found))
                            .map_err(|message| (message, GROUP)),
                    };
                    if let Err((message, help)) = found {
                        let message = format!("{at}{message}");
                        read.report.push(Diagnostic::error(Code::ConfigValue, message).help(help));
                    }
                }
                continue;
            }
            let Some(value) = plain(&source, value.span()) else {
                unknown(&name, &place, read.report);
                continue;
            };
            assign(&name, &value, &place, read);
        }
    }
    tables
}

/// The value at a span, as a value of its own.
fn plain(source: &Source<'_>, span: Range<usize>) -> Option<toml::Value> {
    let text = source.text.get(span)?;
    let mut table: toml::Table = format!("x = {text}").parse().ok()?;
    table.remove("x").filter(|v| !v.is_table())
}

const OVERRIDE: &str = "write scope = \"h.*.attn\" or op = \"softmax\", and dtype = \"fp32\"";
const GROUP: &str =
    "write scope = \"h.*.mlp.**\", and lr = 1e-4, weight_decay = 0.0 or kind = \"adamw\"";

fn read_group(source: &Source<'_>, value: &DeValue<'_>) -> Result<ParamGroup, String> {
    let DeValue::Table(table) = value else {
        return Err("`optimizer.group` is a list of tables".into());
    };
    let mut found = ParamGroup::default();
    for (key, value) in table {
        let value = plain(source, value.span());
        let number = || {
            // The bounds of a group's setting are those of the setting of all.
            let key = find(&format!("optimizer.{}", key.get_ref()));
            let value = value.as_ref().ok_or_else(|| "a number is missing".to_string())?;
            match key.map(|key| key.read(value)).transpose()? {
                Some(Value::Number(x)) => Ok(Some(x)),
                _ => Err(format!("{value} is not a number")),
            }
        };
        match key.get_ref().as_ref() {
            "scope" => {
                let text = value.as_ref().and_then(|v| v.as_str());
                found.scope = text.ok_or("`scope` must be a string")?.into();
            }
            "lr" => found.lr = number()?,
            "weight_decay" => found.weight_decay = number()?,
            "kind" => {
                let word = value.as_ref().and_then(|v| v.as_str());
                let kind = word.filter(|w| GROUP_KINDS.contains(w)).and_then(OptimizerKind::of);
                found.kind = Some(kind.ok_or("`kind` must be \"muon\" or \"adamw\"")?);
            }
            other => return Err(format!("unknown key `{other}` of `optimizer.group`")),
        }
    }
    let given = found.lr.is_some() || found.weight_decay.is_some() || found.kind.is_some();
    match (found.scope.is_empty(), given) {
        (true, _) => Err("`scope` is missing".into()),
        (_, false) => Err("none of `lr`, `weight_decay` and `kind` is given".into()),
        _ => Ok(found),
    }
}

fn read_override(source: &Source<'_>, value: &DeValue<'_>) -> Result<Override, String> {
    let DeValue::Table(table) = value else {
        return Err("`precision.override` is a list of tables".into());
    };
    let (mut scope, mut op, mut dtype, mut output) = (None, None, None, None);
    for (key, value) in table {
        let text = plain(source, value.span()).and_then(|v| v.as_str().map(String::from));
        let Some(text) = text else {
            return Err(format!("`{}` must be a string", key.get_ref()));
        };
        match key.get_ref().as_ref() {
            "scope" => scope = Some(text),
            "op" => op = Some(text),
            "dtype" => dtype = Some(float(&text)?),
            "output" => output = Some(float(&text)?),
            other => return Err(format!("unknown key `{other}` of `precision.override`")),
        }
    }
    match (dtype, &scope, &op) {
        (None, ..) => Err("`dtype` is missing".into()),
        (_, None, None) => Err("give `scope`, `op` or both".into()),
        (Some(dtype), ..) => Ok(Override { scope, op, dtype, output }),
    }
}

fn float(text: &str) -> Result<DType, String> {
    let dtype = float_name(text).and_then(|name| name.parse().ok());
    dtype.ok_or_else(|| format!("`{text}` is not a float type"))
}

/// Applies `key=value` settings; values are TOML, and a bare word is a text.
pub(super) fn settings(sets: &[String], read: &mut Read<'_>) {
    for set in sets {
        let Some((name, text)) = set.split_once('=') else {
            read.report.push(
                Diagnostic::error(Code::ConfigValue, format!("--set {set}: there is no `=`"))
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
        assign(name, &value, &place, read);
    }
}

fn assign(name: &str, value: &toml::Value, place: &str, read: &mut Read<'_>) {
    let Some(key) = find(name) else {
        unknown(name, place, read.report);
        return;
    };
    match key.read(value) {
        Ok(value) => {
            read.values.insert(key.name, value);
            read.written.insert(key.name, place.into());
        }
        Err(message) => {
            read.report.push(Diagnostic::error(Code::ConfigValue, format!("{place}{message}")))
        }
    }
}

fn unknown(name: &str, place: &str, report: &mut Report) {
    let help = match alike(name, KEYS.iter().map(|k| k.name)) {
        Some(key) => format!("did you mean `{key}`?"),
        None => "`frit compile --help-config` lists all keys".into(),
    };
    report.push(
        Diagnostic::error(Code::ConfigKeyUnknown, format!("{place}unknown key `{name}`"))
            .help(help),
    );
}
