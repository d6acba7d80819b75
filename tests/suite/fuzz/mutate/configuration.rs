//! Mutations of a configuration, by its keys and their value types.

use super::{changes, number, pick};
use crate::machine::Random;
use frit::config::{KEYS, Kind};
use serde_json::{Value, json};

/// Texts that some key takes.
const TEXTS: [&str; 18] = [
    "**",
    "*",
    "h.*",
    "h.0",
    "up",
    "a",
    "labels",
    "auto",
    "none",
    "blocks",
    "size=8",
    "h.*=2",
    "x=0..1",
    "0.5 * mse(a, more)",
    "top_2",
    "x86-64-v3",
    "sm_90",
    "L02",
];
/// Numbers that some key takes.
const FRACTIONS: [f64; 9] = [0.0, 0.5, 0.9, 0.999, 1.0, 1e-8, 1e-30, 3e38, 65536.0];

/// Sets some keys to values that are mostly right.
pub(in crate::fuzz) fn change(random: &mut Random, root: &mut Value) {
    for _ in 0..changes(random) {
        let key = pick(random, KEYS);
        let value = value(random, key.kind);
        let Some((section, name)) = key.name.split_once('.') else { continue };
        let Some(sections) = root.as_object_mut() else { return };
        let section = sections.entry(section).or_insert_with(|| json!({}));
        if let Some(keys) = section.as_object_mut() {
            keys.insert(name.into(), value);
        }
    }
}

fn value(random: &mut Random, kind: Kind) -> Value {
    if random.below(24) == 0 {
        return [json!(-1), json!(1e300), json!("no such word"), json!([]), json!(true)]
            [random.below(5)]
        .clone();
    }
    let whole = |random: &mut Random, least: u64, most: u64| {
        let far = number(random, 4).unsigned_abs();
        json!([least, least + 1, least + 2, far.clamp(least, most), most][random.below(5)])
    };
    let fraction = |random: &mut Random, least: f64, most: f64| {
        json!([least, pick(random, &FRACTIONS).clamp(least, most)][random.below(2)])
    };
    match kind {
        Kind::Integer(least, most) => whole(random, least, most),
        Kind::Number(least, most) => fraction(random, least, most.min(3e38)),
        Kind::Boolean => json!(random.below(2) == 0),
        Kind::Text => json!(pick(random, &TEXTS)),
        Kind::Choice(words) => json!(pick(random, words)),
        Kind::ChoiceOrAuto(words) => json!(pick(random, &[words, &["auto"]].concat())),
        Kind::Float(words) => {
            json!(pick(random, &[words, &["fp32", "fp16", "bf16"]].concat()))
        }
        Kind::ChoiceOrNumber(words, _, _) if random.below(2) == 0 => json!(pick(random, words)),
        Kind::ChoiceOrNumber(_, least, most) => fraction(random, least, most.min(3e38)),
        Kind::ChoiceOrInteger(words, _) if !words.is_empty() && random.below(2) == 0 => {
            json!(pick(random, words))
        }
        Kind::ChoiceOrInteger(_, min) => json!(number(random, min.max(-1))),
        Kind::Bytes(words) if random.below(3) == 0 => json!(pick(random, words)),
        Kind::Bytes(_) => json!(["1KiB", "64KiB", "16e9", "24GiB"][random.below(4)]),
        Kind::Pair => json!([fraction(random, 0.0, 0.9999), fraction(random, 0.0, 0.9999)]),
        Kind::Triple => {
            let mut any = || fraction(random, -10.0, 10.0);
            json!([any(), any(), any()])
        }
        Kind::ListOrInteger if random.below(2) == 0 => whole(random, 1, 4),
        Kind::List | Kind::ListOrInteger => {
            json!((0..random.below(3)).map(|_| *pick(random, &TEXTS)).collect::<Vec<_>>())
        }
    }
}
