//! Pairs of graphs that compute something else, though by laws that hold of most numbers they would not, and of such that compute the same.

use crate::{Comparer, Ranks};
use frit_ir::Graph;

const X: &str = "%x: f32[4] = input {name = \"x\", ty = {\"dtype\":\"f32\",\"shape\":[4]}}";

fn graph(nodes: &str) -> Graph {
    frit_ir::text::parse(&format!("graph @g world=1 {{\n{nodes}\n}}"))
        .unwrap_or_else(|e| panic!("{e}: {nodes}"))
}

/// Graphs of one input `x: f32[4]` and of scalars by name.
fn of_x(scalars: &[(&str, &str, &str)], nodes: &str) -> Graph {
    let constant = |(name, dtype, value): &(&str, &str, &str)| {
        format!(
            "%{name}: {dtype}[] = constant {{splat = {value}, ty = {{\"dtype\":\"{dtype}\",\"shape\":[]}}}}\n"
        )
    };
    let scalars: String = scalars.iter().map(constant).collect();
    graph(&format!("{X}\n{scalars}{nodes}\nreturn %y as \"y\" gradient"))
}

fn is_equal(before: &Graph, after: &Graph) -> bool {
    [Comparer::of_bits(), Comparer::of_rounded_numbers(), Comparer::of_real_numbers()]
        .iter_mut()
        .any(|comparer| comparer.compare(before, after, Ranks::ONE).is_empty())
}

#[test]
fn integers_are_exact() {
    let whole = |value: &str| {
        of_x(
            &[("n", "i64", value)],
            "%i: i64[4] = cast %x {to = \"i64\"}\n%j: i64[4] = add %i, %n\n%y: f32[4] = cast %j {to = \"f32\"}",
        )
    };
    assert!(!is_equal(&whole("1500100"), &whole("1500103")));
}

#[test]
fn laws_of_powers_and_logarithms_know_signs() {
    let x = of_x(&[("one", "f32", "1.0")], "%y: f32[4] = mul %x, %one");
    let size = of_x(
        &[("half", "f32", "0.5")],
        "%0: f32[4] = mul %x, %x\n%1: f32[4] = log %0\n%2: f32[4] = mul %1, %half\n%y: f32[4] = exp %2",
    );
    assert!(!is_equal(&x, &size));
}

#[test]
fn a_mask_that_is_fed_excludes_nothing_by_itself() {
    let masked = |scale: &str| {
        let mask = "%m: f32[4] = input {name = \"m\", ty = {\"dtype\":\"f32\",\"shape\":[4]}}";
        of_x(
            &[("low", "f32", "-10000.0"), ("one", "f32", "1.0"), ("scale", "f32", scale)],
            &format!(
                "{mask}\n%0: f32[4] = sub %one, %m\n%1: f32[4] = mul %0, %low\n%2: f32[4] = mul %x, %scale\n\
                 %3: f32[4] = add %2, %1\n%y: f32[4] = softmax %3 {{axis = 0}}"
            ),
        )
    };
    assert!(is_equal(&masked("1.0"), &masked("1.0")));
    assert!(!is_equal(&masked("1.0"), &masked("3.0")));
    // Low numbers that are chosen are what they are, but in a softmax.
    let chosen = |low: &str, softmax: bool| {
        let last = if softmax { "softmax %0 {axis = 0}" } else { "tanh %0" };
        of_x(
            &[("low", "f32", low), ("zero", "f32", "0.0")],
            &format!(
                "%c: bool[4] = gt %x, %zero\n%0: f32[4] = select %c, %x, %low\n%y: f32[4] = {last}"
            ),
        )
    };
    assert!(!is_equal(&chosen("-20000.0", false), &chosen("-900000.0", false)));
    assert!(is_equal(&chosen("-20000.0", true), &chosen("-900000.0", true)));
}

#[test]
fn infinities_may_occur() {
    let guarded = of_x(
        &[("zero", "f32", "0.0")],
        "%i: bool[4] = is_inf %x\n%y: f32[4] = select %i, %zero, %x",
    );
    let bare = of_x(&[("one", "f32", "1.0")], "%y: f32[4] = mul %x, %one");
    assert!(!is_equal(&guarded, &bare));
}

#[test]
fn leaves_are_all_that_they_are() {
    let input = |dtype: &str| {
        graph(&format!(
            "%n: {dtype}[4] = input {{name = \"n\", ty = {{\"dtype\":\"{dtype}\",\"shape\":[4]}}}}\n\
             %y: f32[4] = cast %n {{to = \"f32\"}}\nreturn %y as \"y\" gradient"
        ))
    };
    assert!(is_equal(&input("i64"), &input("i64")) && !is_equal(&input("i64"), &input("bool")));
    let param = |init: &str, kind: &str, held: &str| {
        let ty = if held.is_empty() { "f32" } else { "bf16" };
        graph(&format!(
            "%w: {ty}[4] = param {{{held}init = {init}, kind = \"{kind}\", name = \"w\", reason = \"\", \
             ty = {{\"dtype\":\"f32\",\"shape\":[4]}}}}\n%c: f32[4] = cast %w {{to = \"f32\"}}\n\
             %y: f32[4] = tanh %c\nreturn %y as \"y\" gradient"
        ))
    };
    let normal = "{\"normal\":{\"std\":0.5}}";
    let first = param(normal, "trainable", "");
    assert!(is_equal(&first, &first));
    assert!(!is_equal(&first, &param("{\"normal\":{\"std\":0.1}}", "trainable", "")));
    assert!(!is_equal(&first, &param(normal, "frozen", "")));
    // Held in a narrower dtype it is rounded.
    let held = param(normal, "trainable", "held = \"bf16\", ");
    let rounded = Comparer::of_rounded_numbers().compare(&first, &held, Ranks::ONE);
    let real = Comparer::of_real_numbers().compare(&first, &held, Ranks::ONE);
    assert!(!rounded.is_empty() && real.is_empty());
}

#[test]
fn what_is_carried_on_stays_in_its_part_of_a_step() {
    let sum = |region: &str| {
        graph(&format!(
            "{X}\n%s: f32[] = state {{init = 0.0, name = \"loss_sum\", ty = {{\"dtype\":\"f32\",\"shape\":[]}}}} @backward\n\
             %0: f32[] = reduce %x {{axes = [0], f = \"sum\", keep_dims = false}}\n\
             %y: f32[] = add %s, %0 {region}\nreturn %y as \"loss_sum\" carry %s"
        ))
    };
    assert!(is_equal(&sum("@backward"), &sum("@backward")));
    assert!(!is_equal(&sum("@backward"), &sum("@update")));
}

#[test]
fn results_may_not_be_missing() {
    let both = graph(&format!("{X}\n%y: f32[4] = tanh %x\nreturn %x as \"x\"\nreturn %y as \"y\""));
    let one = graph(&format!("{X}\n%y: f32[4] = tanh %x\nreturn %y as \"y\""));
    assert!(!is_equal(&both, &one));
    assert!(Comparer::of_bits().compare_stated(&both, &one, Ranks::ONE).is_empty());
}

#[test]
fn what_passes_no_gradient_on_stays_until_gradients_are_taken() {
    let plain = of_x(&[], "%y: f32[4] = tanh %x");
    let detached = of_x(&[], "%0: f32[4] = detach %x\n%y: f32[4] = tanh %0");
    for (before_gradients, differ) in [(true, true), (false, false)] {
        for mut comparer in [Comparer::of_bits(), Comparer::of_real_numbers()] {
            let comparer = comparer.before_gradients(before_gradients);
            let same = comparer.compare(&plain, &detached, Ranks::ONE).is_empty();
            assert_eq!(same, !differ);
        }
    }
}

#[test]
fn what_is_left_of_numbers_that_differ_counts() {
    let scaled = |factor: &str| {
        of_x(
            &[("f", "f32", factor), ("k", "f32", "246723.0")],
            "%0: f32[4] = mul %x, %f\n%1: f32[4] = sub %x, %0\n%2: f32[4] = mul %1, %k\n%y: f32[4] = add %x, %2",
        )
    };
    let bare = of_x(&[("one", "f32", "1.0")], "%y: f32[4] = mul %x, %one");
    assert!(is_equal(&bare, &scaled("1.0")));
    assert!(!is_equal(&bare, &scaled("1.000004")));
    assert!(!is_equal(&bare, &scaled("1.000002")));
}

#[test]
fn numbers_of_16_bits_are_rounded_from_others() {
    let wide = |scale: &str| of_x(&[("k", "f32", scale)], "%y: f32[4] = mul %x, %k");
    let narrow = |scale: &str| {
        of_x(
            &[("k", "bf16", scale)],
            "%0: bf16[4] = cast %x {to = \"bf16\"}\n%1: bf16[4] = mul %0, %k\n%y: f32[4] = cast %1 {to = \"f32\"}",
        )
    };
    // The neighbors of 0.17677669 in bf16 are 0.17675781 and 0.17773438.
    assert!(is_equal(&wide("0.17677669"), &narrow("0.1767578125")));
    assert!(!is_equal(&wide("0.17677669"), &narrow("0.177734375")));
    assert!(!is_equal(&wide("0.125"), &narrow("0.1259765625")));
    assert!(!is_equal(&narrow("0.125"), &narrow("0.1259765625")));
}

#[test]
fn tables_of_16_bits_are_rounded_from_others() {
    let table = |dtype: &str, values: &str| {
        let narrow = "%0: bf16[4] = cast %x {to = \"bf16\"}\n%1: bf16[4] = mul %0, %k\n%y: f32[4] = cast %1 {to = \"f32\"}";
        let nodes = if dtype == "f32" { "%y: f32[4] = mul %x, %k" } else { narrow };
        let ty = format!("ty = {{\"dtype\":\"{dtype}\",\"shape\":[4]}}");
        graph(&format!(
            "{X}\n%k: {dtype}[4] = constant {{{ty}, values = [{values}]}}\n{nodes}\nreturn %y as \"y\" gradient"
        ))
    };
    let wide = table("f32", "0.17677669, -0.3, 2.7, 0.0");
    assert!(is_equal(&wide, &table("bf16", "0.1767578125, -0.30078125, 2.703125, 0.0")));
    assert!(!is_equal(&wide, &table("bf16", "0.1767578125, -0.298828125, 2.703125, 0.0")));
    assert!(!is_equal(&wide, &table("f32", "0.17677669, -0.3, 2.70001, 0.0")));
}
