//! The JSON Schema of `train.toml`, for editors that complete and check TOML files.

use super::help::{TABLES, Table};
use super::keys::{Key, sections};
use super::kind::{AUTO, INF, Kind, TINY, UNITS};
use serde_json::{Map, Value, json};

/// `docs/train.schema.json`.
pub fn json_schema() -> String {
    let mut properties = Map::new();
    for (section, keys) in sections() {
        let mut entries: Map<String, Value> =
            keys.iter().map(|key| (key.split().1.into(), property(key))).collect();
        for table in TABLES.iter().filter(|table| table.section == section) {
            entries.insert(table.name.into(), list_of(table));
        }
        properties.insert(section.into(), object(entries));
    }
    let schema = with(
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Configuration of a compilation (train.toml)",
        }),
        object(properties),
    );
    let mut text = serde_json::to_string_pretty(&schema).expect("invariant: a schema is JSON");
    text.push('\n');
    text
}

/// An object with these keys and no others.
fn object(properties: Map<String, Value>) -> Value {
    json!({ "type": "object", "properties": properties, "additionalProperties": false })
}

/// One object with the members of both.
fn with(mut schema: Value, more: Value) -> Value {
    if let (Some(schema), Value::Object(more)) = (schema.as_object_mut(), more) {
        schema.extend(more);
    }
    schema
}

fn property(key: &Key) -> Value {
    let default: toml::Table =
        format!("x = {}", key.default).parse().expect("invariant: defaults are TOML");
    with(of(key.kind), json!({ "description": key.doc.trim(), "default": default["x"] }))
}

fn list_of(table: &Table) -> Value {
    let fields = table.fields.iter().map(|(name, kind)| ((*name).into(), of(*kind))).collect();
    let any: Vec<Value> = table.any.iter().map(|name| json!({ "required": [name] })).collect();
    let items = with(object(fields), json!({ "required": table.required, "anyOf": any }));
    json!({ "type": "array", "description": table.doc, "items": items })
}

/// The values that [`Kind::read`] accepts.
fn of(kind: Kind) -> Value {
    let words = |words: &[&str]| json!({ "enum": words });
    let either = |list: &[&str], other: Value| match list {
        [] => other,
        list => json!({ "anyOf": [words(list), other] }),
    };
    let integer = |min: i64| match min {
        i64::MIN => json!({ "type": "integer" }),
        _ => json!({ "type": "integer", "minimum": min }),
    };
    let texts = json!({ "type": "array", "items": { "type": "string" } });
    match kind {
        Kind::Integer(min, max) => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Kind::Number(min, max) => number(min, max),
        Kind::Boolean => json!({ "type": "boolean" }),
        Kind::Text => json!({ "type": "string" }),
        Kind::Choice(list) => words(list),
        Kind::ChoiceOrAuto(list) => words(&[list, &[AUTO]].concat()),
        Kind::Float(list) => words(&[list, &["fp32", "bf16", "fp16", "f32", "f16"]].concat()),
        Kind::ChoiceOrNumber(list, min, max) => either(list, number(min, max)),
        Kind::ChoiceOrInteger(list, min) => either(list, integer(min)),
        Kind::Bytes(list) => {
            let units: Vec<&str> = UNITS.iter().map(|(unit, _)| *unit).collect();
            let pattern = format!(r"^\s*[0-9.]+(e[0-9]+)?\s*({})?\s*$", units.join("|"));
            let bytes = json!({ "type": "string", "pattern": pattern });
            json!({ "anyOf": [words(list), number(0.0, 1e18), bytes] })
        }
        Kind::Pair => {
            let number = json!({ "type": "number", "minimum": 0, "exclusiveMaximum": 1 });
            json!({ "type": "array", "items": number, "minItems": 2, "maxItems": 2 })
        }
        Kind::Triple => {
            let number = json!({ "type": "number" });
            json!({ "type": "array", "items": number, "minItems": 3, "maxItems": 3 })
        }
        Kind::List => texts,
        Kind::ListOrInteger => json!({ "anyOf": [texts, integer(i64::MIN)] }),
    }
}

fn number(min: f64, max: f64) -> Value {
    let least = match min {
        TINY => json!({ "exclusiveMinimum": 0 }),
        min => json!({ "minimum": min }),
    };
    let most = match max {
        INF => json!({}),
        max => json!({ "maximum": max }),
    };
    with(with(json!({ "type": "number" }), least), most)
}
