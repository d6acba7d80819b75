//! Mutations that keep JSON well-formed and mostly valid: a value is taken from another occurrence of its key.

use super::{changes, number, pick};
use crate::machine::Random;
use serde_json::Value;

/// Makes a few changes; some take parts of another value, or one of `words` as a text.
pub(in crate::fuzz) fn change(
    random: &mut Random,
    root: &mut Value,
    other: &Value,
    words: &[&str],
) {
    for _ in 0..changes(random) {
        match random.below(10) {
            0 => everywhere(random, root),
            1 => transplant(random, root, other),
            2..=4 => {
                let mut at = random.below(listed(root).len());
                visit(root, &mut at, &mut |value| once(random, value, words));
            }
            n => exchange(random, root, if n < 8 { None } else { Some(other) }),
        }
    }
}

/// Every value, in the order of [`visit`], with the key that it, or the list around it, stands under.
fn listed(root: &Value) -> Vec<(&str, &Value)> {
    fn list<'a>(key: &'a str, value: &'a Value, found: &mut Vec<(&'a str, &'a Value)>) {
        found.push((key, value));
        match value {
            Value::Array(all) => all.iter().for_each(|v| list(key, v, found)),
            Value::Object(all) => all.iter().for_each(|(k, v)| list(k, v, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    list("", root, &mut found);
    found
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

fn alike(a: &Value, b: &Value) -> bool {
    std::mem::discriminant(a) == std::mem::discriminant(b)
}

/// Puts a value where the same key has another of the same kind.
fn exchange(random: &mut Random, root: &mut Value, other: Option<&Value>) {
    let all = listed(root);
    let mut at = 1 + random.below(all.len().saturating_sub(1).max(1));
    let Some((key, old)) = all.get(at).copied() else { return };
    let donors = other.map_or_else(|| listed(root), listed);
    let fits = |(k, v): &&(&str, &Value)| *k == key && alike(v, old) && *v != old;
    let fitting: Vec<_> = donors.iter().filter(fits).collect();
    let Some((_, new)) = fitting.get(random.below(fitting.len())) else {
        return visit_once(random, root, at);
    };
    let new = (*new).clone();
    visit(root, &mut at, &mut |value| *value = new.clone());
}

fn visit_once(random: &mut Random, root: &mut Value, mut at: usize) {
    visit(root, &mut at, &mut |value| once(random, value, &[]));
}

/// Replaces a number or text wherever it stands, such as a size or a name.
fn everywhere(random: &mut Random, root: &mut Value) {
    let all = listed(root);
    let found: Vec<&(&str, &Value)> =
        all.iter().filter(|(_, v)| v.is_i64() || v.is_string()).collect();
    let Some((key, old)) = found.get(random.below(found.len())) else { return };
    let new = match old.as_i64() {
        Some(n) => Value::from(number(random, n)),
        None => {
            let same: Vec<_> = found.iter().filter(|(k, _)| k == key).collect();
            pick(random, &same).1.clone()
        }
    };
    let old = (*old).clone();
    replace(root, &old, &new);
}

fn replace(value: &mut Value, old: &Value, new: &Value) {
    match value {
        v if v == old => *v = new.clone(),
        Value::Array(all) => all.iter_mut().for_each(|v| replace(v, old, new)),
        Value::Object(all) => all.values_mut().for_each(|v| replace(v, old, new)),
        _ => {}
    }
}

/// Puts a part of another value into a list of such.
fn transplant(random: &mut Random, root: &mut Value, other: &Value) {
    let parts = listed(other);
    let (key, part) = *pick(random, &parts);
    let fits = |(k, v): &(&str, &Value)| {
        *k == key && v.as_array().and_then(|all| all.first()).is_some_and(|v| alike(v, part))
    };
    let places: Vec<usize> =
        listed(root).iter().enumerate().filter(|(_, v)| fits(v)).map(|(at, _)| at).collect();
    let Some(at) = places.get(random.below(places.len())) else { return };
    visit(root, &mut at.clone(), &mut |value| {
        let Value::Array(all) = value else { return };
        all.insert(random.below(all.len() + 1), part.clone());
    });
}

fn once(random: &mut Random, value: &mut Value, words: &[&str]) {
    match value {
        Value::Number(old) if random.below(8) > 0 => {
            let old = old.as_i64().unwrap_or(1);
            *value = match random.below(12) {
                0 => Value::from(old as f64 + 0.5),
                1 => Value::from(1e300),
                _ => Value::from(number(random, old)),
            };
        }
        Value::String(_) if !words.is_empty() && random.below(4) > 0 => {
            *value = Value::from(*pick(random, words));
        }
        Value::String(text) => match random.below(3) {
            0 => text.clear(),
            1 => *text = text.repeat(2),
            _ => text.push('\u{e9}'),
        },
        Value::Array(all) if !all.is_empty() => {
            let (at, other) = (random.below(all.len()), random.below(all.len()));
            match random.below(12) {
                0..=2 => drop(all.remove(at)),
                3..=5 => all.insert(other, all[at].clone()),
                6..=8 => all.swap(at, other),
                9 | 10 => all[at] = all[other].clone(),
                _ => all.clear(),
            }
        }
        Value::Object(all) if !all.is_empty() => {
            let keys: Vec<String> = all.keys().cloned().collect();
            let (at, other) = (pick(random, &keys), pick(random, &keys));
            match random.below(3) {
                0 => drop(all.remove(at)),
                1 => drop(all.insert(at.clone(), all[other].clone())),
                _ => drop(all.insert(format!("{other}{at}"), all[at].clone())),
            }
        }
        Value::Bool(b) => *b = !*b,
        _ => {
            let others = [Value::Null, Value::from(1), Value::from(""), Value::Array(vec![])];
            *value = pick(random, &others).clone();
        }
    }
}
