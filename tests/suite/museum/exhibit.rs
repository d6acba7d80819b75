//! A file of the museum: what happened, where it was published, and what Frit does about it.

use super::attempt::Attempt;
use crate::support::file;
use toml::{Table, Value};

/// How an error is noticed here; the page lists them in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Status {
    NotCaught,
    Outside,
    FirstStep,
    Audit,
    Lint,
    Refused,
    Verify,
    Impossible,
}

impl Status {
    pub(super) const ALL: [Status; 8] = [
        Status::NotCaught,
        Status::Outside,
        Status::FirstStep,
        Status::Audit,
        Status::Lint,
        Status::Refused,
        Status::Verify,
        Status::Impossible,
    ];

    /// Its name in the files.
    pub(super) fn name(self) -> &'static str {
        match self {
            Status::NotCaught => "not caught",
            Status::Outside => "outside",
            Status::FirstStep => "first step",
            Status::Audit => "audit",
            Status::Lint => "lint",
            Status::Refused => "refused",
            Status::Verify => "verify",
            Status::Impossible => "impossible",
        }
    }

    /// What it means.
    pub(super) fn meaning(self) -> &'static str {
        match self {
            Status::NotCaught => {
                "The same mistake can be made here, and nothing before the first step notices it."
            }
            Status::Outside => {
                "Frit has nothing in which this mistake could be made; it is left to other programs."
            }
            Status::FirstStep => {
                "The run ends with an error at the step in which it happens, not before."
            }
            Status::Audit => {
                "Nothing is said unless it is asked for: `frit audit`, before the first step, finds it."
            }
            Status::Lint => {
                "The plan is written, and `frit compile`, or `frit run` before its first step, warns."
            }
            Status::Refused => {
                "`frit compile`, or `frit run` before its first step, ends with an error."
            }
            Status::Verify => {
                "The compiler does not make such a plan. If a pass or an editor does, `verify_plan`, which runs before a plan is written, \
                 refuses it, or the certificate of `frit verify`."
            }
            Status::Impossible => {
                "Neither a model nor a configuration can express it; what is computed instead is compared with the right value."
            }
        }
    }
}

/// One error.
pub(super) struct Exhibit {
    /// Its file, without the extension.
    pub(super) name: String,
    pub(super) title: String,
    /// The library or paper by which the page counts it.
    pub(super) source: String,
    pub(super) link: String,
    /// Reports of the same mistake.
    pub(super) also: Vec<String>,
    pub(super) status: Status,
    pub(super) happened: String,
    pub(super) here: String,
    /// Why no attempt can be made in a test.
    pub(super) untested: Option<String>,
    pub(super) attempts: Vec<Attempt>,
}

/// All files, by name.
pub(super) fn exhibits() -> Vec<Exhibit> {
    let folder = std::fs::read_dir(file("tests/museum")).expect("the museum");
    let paths = folder.map(|e| e.expect("an entry").path());
    let mut paths: Vec<_> = paths.filter(|p| p.extension().is_some_and(|e| e == "toml")).collect();
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(path).expect("text");
        let table: Table = text.parse().unwrap_or_else(|e| panic!("{name}: {e}"));
        exhibit(&name, table)
    };
    paths.iter().map(read).collect()
}

fn exhibit(name: &str, mut table: Table) -> Exhibit {
    let mut text = |key: &str| match table.remove(key) {
        Some(Value::String(text)) => text.split_whitespace().collect::<Vec<_>>().join(" "),
        other => panic!("{name}: `{key}` is {other:?}"),
    };
    let (title, source, link) = (text("title"), text("source"), text("link"));
    let (status, happened, here) = (text("status"), text("happened"), text("here"));
    let is = |s: &Status| s.name() == status;
    let status = *Status::ALL.iter().find(|s| is(s)).unwrap_or_else(|| panic!("{name}: {status}"));
    let untested = table.contains_key("untested").then(|| match table.remove("untested") {
        Some(Value::String(text)) => text,
        other => panic!("{name}: `untested` is {other:?}"),
    });
    let also = table.remove("also").map_or(vec![], |v| strings(name, &v));
    let attempts = match table.remove("attempt") {
        Some(Value::Array(items)) => items,
        None => vec![],
        other => panic!("{name}: `attempt` is {other:?}"),
    };
    let attempt = |value: Value| match value {
        Value::Table(table) => Attempt::read(name, table),
        other => panic!("{name}: {other}"),
    };
    let attempts = attempts.into_iter().map(attempt).collect();
    assert!(table.is_empty(), "{name}: unknown keys {:?}", table.keys().collect::<Vec<_>>());
    Exhibit {
        name: name.into(),
        title,
        source,
        link,
        also,
        status,
        happened,
        here,
        untested,
        attempts,
    }
}

/// A list of texts.
pub(super) fn strings(name: &str, value: &Value) -> Vec<String> {
    let items = value.as_array().unwrap_or_else(|| panic!("{name}: {value} is no list"));
    let text = |v: &Value| v.as_str().unwrap_or_else(|| panic!("{name}: {v} is no text")).into();
    items.iter().map(text).collect()
}
