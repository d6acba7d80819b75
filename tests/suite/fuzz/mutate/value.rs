//! Changes of JSON that leave it JSON.

use super::{number, pick};
use crate::machine::Random;
use serde_json::Value;

/// Makes one to four changes.
pub(in crate::fuzz) fn change(random: &mut Random, root: &mut Value) {
    for _ in 0..1 + random.below(4) {
        let texts = {
            let mut found = Vec::new();
            collect_texts(root, &mut found);
            found
        };
        let mut size = count(root);
        let at = random.below(size);
        size = at;
        visit(root, &mut size, &mut |value| once(random, value, &texts));
    }
}

fn children(value: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match value {
        Value::Array(all) => Box::new(all.iter()),
        Value::Object(all) => Box::new(all.values()),
        _ => Box::new(std::iter::empty()),
    }
}

fn count(value: &Value) -> usize {
    1 + children(value).map(count).sum::<usize>()
}

fn collect_texts(value: &Value, found: &mut Vec<String>) {
    if let Value::String(text) = value {
        found.push(text.clone());
    }
    children(value).for_each(|v| collect_texts(v, found));
}

/// Calls `f` with the value that has `left` others before it.
fn visit(value: &mut Value, left: &mut usize, f: &mut dyn FnMut(&mut Value)) -> bool {
    if *left == 0 {
        f(value);
        return true;
    }
    *left -= 1;
    match value {
        Value::Array(all) => all.iter_mut().any(|v| visit(v, left, f)),
        Value::Object(all) => all.values_mut().any(|v| visit(v, left, f)),
        _ => false,
    }
}

fn once(random: &mut Random, value: &mut Value, texts: &[String]) {
    match value {
        Value::Number(old) if random.below(4) > 0 => {
            let old = old.as_i64().unwrap_or(1);
            *value = match random.below(6) {
                0 => Value::from(old as f64 + 0.5),
                1 => Value::from(1e300),
                _ => Value::from(number(random, old)),
            };
        }
        Value::String(_) if !texts.is_empty() && random.below(3) > 0 => {
            *value = Value::from(pick(random, texts).clone());
        }
        Value::String(text) => match random.below(3) {
            0 => text.clear(),
            1 => *text = text.repeat(2),
            _ => text.push('\u{e9}'),
        },
        Value::Array(all) if !all.is_empty() => {
            let (at, other) = (random.below(all.len()), random.below(all.len()));
            match random.below(4) {
                0 => drop(all.remove(at)),
                1 => all.insert(other, all[at].clone()),
                2 => all.swap(at, other),
                _ => all.clear(),
            }
        }
        Value::Object(all) if !all.is_empty() => {
            let keys: Vec<String> = all.keys().cloned().collect();
            let (at, other) = (pick(random, &keys), pick(random, &keys));
            match random.below(3) {
                0 => drop(all.remove(at)),
                1 => drop(all.insert(at.clone(), all[other].clone())),
                _ => {
                    drop(all.insert(pick(random, texts_or(texts, &keys)).clone(), all[at].clone()))
                }
            }
        }
        Value::Bool(b) => *b = !*b,
        _ => {
            let others = [Value::Null, Value::from(1), Value::from(""), Value::Array(vec![])];
            *value = pick(random, &others).clone();
        }
    }
}

fn texts_or<'a>(texts: &'a [String], others: &'a [String]) -> &'a [String] {
    if texts.is_empty() { others } else { texts }
}
