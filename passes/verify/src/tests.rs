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

    // Of (i·k + n), where k or n is one more; also beyond 2⁵³, where numbers of terms are not exact.
    let of_ids = |[k, n]: [u64; 2], nodes: &str| {
        let ids = "%i: i64[4] = input {name = \"i\", ty = {\"dtype\":\"i64\",\"shape\":[4]}}";
        let (k, n) = (k.to_string(), n.to_string());
        of_x(
            &[("k", "i64", &k), ("n", "i64", &n), ("p", "i64", "61"), ("zero", "f32", "0.0")],
            &format!(
                "{ids}\n%0: i64[4] = mul %i, %k\n%1: i64[4] = add %0, %n\n{nodes}\n%y: f32[4] = cast %z {{to = \"f32\"}}"
            ),
        )
    };
    let (small, large) = ([30_000_000, 50_000_000], [1 << 52, (1 << 52) + 2]);
    for (nodes, numbers) in [
        ("%z: bool[4] = lt %1, %i", small),
        ("%z: bool[4] = eq %1, %p", small),
        ("%2: i64[4] = mul %1, %i\n%z: i64[4] = mod %2, %p", small),
        (
            "%2: bool[4] = gt %x, %zero\n%3: i64[4] = select %2, %1, %p\n%z: i64[4] = mod %3, %p",
            small,
        ),
        (
            "%2: i64[5] = pad %1 {high = [0], low = [1], value = 0.0}\n%3: i64[5] = mod %2, %p\n\
             %z: i64[4] = slice %3 {size = [4], start = [0], step = [1]}",
            small,
        ),
        (
            "%b: bool[4] = input {name = \"b\", ty = {\"dtype\":\"bool\",\"shape\":[4]}}\n\
             %2: i64[4] = cast %b {to = \"i64\"}\n%3: i64[4] = mul %2, %k\n%4: i64[4] = add %3, %n\n\
             %5: i64[4] = mul %4, %i\n%z: i64[4] = mod %5, %p",
            [100_000_000, 50_000_000],
        ),
        (
            "%j: i64[4] = input {name = \"j\", ty = {\"dtype\":\"i64\",\"shape\":[4]}}\n\
             %2: i64[4] = add %0, %j\n%3: i64[4] = add %2, %j\n%4: i64[4] = add %3, %j\n%5: i64[4] = mul %4, %n\n\
             %6: i64[4] = cum_sum %5 {axis = 0, exclusive = false, reverse = false}\n%z: i64[4] = mod %6, %p",
            [10_000_018, 49],
        ),
        ("%2: i64[4] = add %1, %k\n%z: i64[4] = mod %2, %p", large),
        ("%2: i64[4] = add %1, %n\n%z: i64[4] = mod %2, %p", large),
        ("%2: i64[4] = mul %0, %k\n%z: i64[4] = mod %2, %p", [(1 << 27) + 1, 0]),
    ] {
        let [k, n] = numbers;
        let graph = |k: u64, n: u64| of_ids([k, n], nodes);
        assert!(is_equal(&graph(k, n), &graph(k, n)), "{nodes}");
        assert!(!is_equal(&graph(k, n), &graph(k + 1, n)), "{nodes}");
        assert!(n == 0 || !is_equal(&graph(k, n), &graph(k, n + 1)), "{nodes}");
    }
}

#[test]
fn types_of_leaves_and_outputs_stay() {
    let input = |shape: &str| {
        graph(&format!(
            "%n: f32{shape} = input {{name = \"n\", ty = {{\"dtype\":\"f32\",\"shape\":{shape}}}}}\n\
             %0: f32[2] = slice %n {{size = [2], start = [0], step = [1]}}\nreturn %0 as \"y\""
        ))
    };
    assert!(is_equal(&input("[4]"), &input("[4]")) && !is_equal(&input("[4]"), &input("[2]")));
    let param = |shape: &str, nodes: &str| {
        graph(&format!(
            "{X}\n%w: f32{shape} = param {{init = {{\"normal\":{{\"std\":0.5}}}}, kind = \"trainable\", \
             name = \"w\", reason = \"\", ty = {{\"dtype\":\"f32\",\"shape\":{shape}}}}}\n{nodes}\n\
             %y: f32[4] = mul %x, %v\nreturn %y as \"y\" gradient"
        ))
    };
    let of_vector = param("[4]", "%v: f32[4] = reshape %w {shape = [4]}");
    let of_row = param("[1, 4]", "%v: f32[4] = reshape %w {shape = [4]}");
    assert!(is_equal(&of_vector, &of_vector) && !is_equal(&of_vector, &of_row));
    let state = |dtype: &str| {
        graph(&format!(
            "%s: {dtype}[] = state {{init = 0.0, name = \"step\", ty = {{\"dtype\":\"{dtype}\",\"shape\":[]}}}}\n\
             %y: f32[] = cast %s {{to = \"f32\"}}\nreturn %y as \"y\" gradient"
        ))
    };
    assert!(is_equal(&state("bf16"), &state("bf16")) && !is_equal(&state("f32"), &state("bf16")));
    let output = |node: &str| graph(&format!("{X}\n{node}\nreturn %y as \"y\""));
    let plain = output("%y: f32[4] = tanh %x");
    let expanded = output("%0: f32[4] = tanh %x\n%y: f32[2, 4] = expand %0 {shape = [2,4]}");
    assert!(is_equal(&plain, &plain) && !is_equal(&plain, &expanded));
    let truth = "%0: bool[4] = gt %x, %x2\n";
    let other = |node: &str| output(&format!("%x2: f32[4] = neg %x\n{truth}{node}"));
    let [bool, number] = [
        other("%y: bool[4] = not %0"),
        other("%1: bool[4] = not %0\n%y: i64[4] = cast %1 {to = \"i64\"}"),
    ];
    assert!(is_equal(&bool, &bool) && !is_equal(&bool, &number));
}

#[test]
fn a_logistic_loss_may_be_written_in_several_ways() {
    let scalars = [("one", "f32", "1.0"), ("zero", "f32", "0.0")];
    let of = |nodes: &str| of_x(&scalars, nodes);
    // ln(1 − σ(x)) and ln σ(−x).
    let softplus = of("%0: f32[4] = softplus %x\n%y: f32[4] = neg %0");
    let complement = of("%0: f32[4] = sigmoid %x\n%1: f32[4] = sub %one, %0\n%y: f32[4] = log %1");
    let opposite = of("%0: f32[4] = neg %x\n%1: f32[4] = sigmoid %0\n%y: f32[4] = log %1");
    let other = of("%0: f32[4] = sigmoid %x\n%y: f32[4] = log %0");
    let difference = of(
        "%0: f32[4] = neg %x\n%1: f32[4] = softplus %0\n%2: f32[4] = add %1, %x\n%y: f32[4] = neg %2",
    );
    for same in [&complement, &opposite, &difference] {
        assert!(is_equal(&softplus, same));
        assert!(!is_equal(&other, same));
    }
    // σ(x) as e to its logarithm.
    let sigmoid = of("%y: f32[4] = sigmoid %x");
    let power = of(
        "%0: f32[4] = neg %x\n%1: f32[4] = softplus %0\n%2: f32[4] = neg %1\n%y: f32[4] = exp %2",
    );
    assert!(is_equal(&sigmoid, &power));
}

#[test]
fn a_logistic_loss_of_a_difference_may_be_written_in_several_ways() {
    let scalars = [("one", "f32", "1.0")];
    // The power of e is a quotient of powers, either way up.
    for difference in ["sub %r, %s", "sub %s, %r"] {
        let of = |nodes: &str| {
            let first = "%r: f32[4] = relu %x\n%s: f32[4] = abs %x\n";
            of_x(&scalars, &format!("{first}%z: f32[4] = {difference}\n{nodes}"))
        };
        let softplus = of("%0: f32[4] = softplus %z\n%y: f32[4] = neg %0");
        let complement =
            of("%0: f32[4] = sigmoid %z\n%1: f32[4] = sub %one, %0\n%y: f32[4] = log %1");
        let other = of("%0: f32[4] = sigmoid %z\n%y: f32[4] = log %0");
        assert!(is_equal(&softplus, &complement), "{difference}");
        assert!(!is_equal(&softplus, &other), "{difference}");
    }
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

/// What is not equal though a law of real numbers, or of other operands, says so: two graphs of `x: f32[4]` and the operands of each.
#[test]
fn integers_infinities_and_truth_values_have_laws_of_their_own() {
    let ids = "%i: i64[4] = input {name = \"i\", ty = {\"dtype\":\"i64\",\"shape\":[4]}}";
    let scalars = [
        ("one", "i64", "1"),
        ("six", "i64", "6"),
        ("many", "i64", "10000000"),
        ("fewer", "i64", "9999999"),
        ("large", "i64", "16777217"),
        ("inf", "f32", "\"-inf\""),
        ("zero", "f32", "0.0"),
        ("unit", "f32", "1.0"),
    ];
    let of = |nodes: &str| of_x(&scalars, &format!("{ids}\n{nodes}"));
    let float = "%y: f32[4] = cast %j {to = \"f32\"}";
    let bytes = "%u: u8[4] = cast %i {to = \"u8\"}\n%v: f32[4] = cast %u {to = \"f32\"}";
    for (before, after) in [
        // Bits of integers are no truth values.
        (format!("%j: i64[4] = xor %i, %six\n{float}"), format!("%j: i64[4] = add %i, %i\n{float}")),
        (format!("%j: i64[4] = and %i, %one\n{float}"), "%y: f32[4] = cast %i {to = \"f32\"}".into()),
        (format!("%j: i64[4] = and %i, %six\n{float}"), format!("%j: i64[4] = mul %i, %six\n{float}")),
        // They are exact, and wrap in their dtype.
        (
            format!("%k: i64[4] = add %i, %many\n%j: i64[4] = sub %k, %fewer\n{float}"),
            "%y: f32[4] = cast %i {to = \"f32\"}".into(),
        ),
        (
            format!("{bytes}\n%w: u8[4] = add %u, %u\n%y: f32[4] = cast %w {{to = \"f32\"}}"),
            format!("{bytes}\n%y: f32[4] = add %v, %v"),
        ),
        (
            format!("%k: i32[4] = cast %i {{to = \"i32\"}}\n%j: i64[4] = cast %k {{to = \"i64\"}}\n{float}"),
            "%y: f32[4] = cast %i {to = \"f32\"}".into(),
        ),
        // A float holds another number.
        (
            "%0: bool[4] = lt %i, %large\n%y: f32[4] = cast %0 {to = \"f32\"}".into(),
            "%0: f32[4] = cast %i {to = \"f32\"}\n%1: f32[] = cast %large {to = \"f32\"}\n\
             %2: bool[4] = lt %0, %1\n%y: f32[4] = cast %2 {to = \"f32\"}"
                .into(),
        ),
        // What is compared with an infinity may be one.
        (
            "%0: bool[4] = gt %x, %inf\n%y: f32[4] = select %0, %x, %zero".into(),
            "%y: f32[4] = mul %x, %unit".into(),
        ),
        (
            "%0: bool[4] = eq %x, %inf\n%y: f32[4] = select %0, %zero, %x".into(),
            "%y: f32[4] = mul %x, %unit".into(),
        ),
        // 1 − 1/t is no truth value where t is.
        (
            "%0: bool[4] = gt %x, %zero\n%t: f32[4] = cast %0 {to = \"f32\"}\n%q: f32[4] = div %unit, %t\n\
             %m: f32[4] = sub %unit, %q\n%y: f32[4] = sigmoid %m"
                .into(),
            "%0: bool[4] = gt %x, %zero\n%t: f32[4] = cast %0 {to = \"f32\"}\n%q: f32[4] = div %unit, %t\n\
             %m: f32[4] = sub %unit, %q\n%n: f32[4] = mul %m, %m\n%y: f32[4] = sigmoid %n"
                .into(),
        ),
    ] {
        let (before, after): (String, String) = (before, after);
        assert!(is_equal(&of(&before), &of(&before)), "{before}");
        assert!(!is_equal(&of(&before), &of(&after)), "{before}\n\n{after}");
    }
}

#[test]
fn integers_of_rounded_constants_are_those_of_the_rounded_ones() {
    let rows = |cast: &str| {
        graph(&format!(
            "%t: f32[300, 4] = param {{init = \"weights\", kind = \"trainable\", name = \"t\", reason = \"\", \
             ty = {{\"dtype\":\"f32\",\"shape\":[300, 4]}}}}\n\
             %c: f32[2] = constant {{ty = {{\"dtype\":\"f32\",\"shape\":[2]}}, values = [257.0, 3.0]}}\n\
             {cast}\n%i: i64[2] = cast %d {{to = \"i64\"}}\n%y: f32[2, 4] = embedding %t, %i {{}}\n\
             return %y as \"y\" gradient"
        ))
    };
    let plain = rows("%d: f32[2] = reshape %c {shape = [2]}");
    assert!(is_equal(&plain, &rows("%d: f32[2] = cast %c {to = \"f32\"}")));
    assert!(!is_equal(&plain, &rows("%d: bf16[2] = cast %c {to = \"bf16\"}")));
}

#[test]
fn names_are_told_apart_by_case_and_kind() {
    let param = |name: &str, id: &str| {
        format!(
            "%{id}: f32[4] = param {{init = \"weights\", kind = \"trainable\", name = \"{name}\", reason = \"\", \
             ty = {{\"dtype\":\"f32\",\"shape\":[4]}}}}"
        )
    };
    let of = |first: &str, second: &str| {
        graph(&format!(
            "{}\n{}\n%a: f32[4] = {first} %v\n%b: f32[4] = {second} %w\n\
             return %a as \"W\" gradient\nreturn %b as \"w\" gradient",
            param("W", "v"),
            param("w", "w")
        ))
    };
    assert!(is_equal(&of("tanh", "exp"), &of("tanh", "exp")));
    assert!(!is_equal(&of("tanh", "exp"), &of("sin", "exp")));
    assert!(!is_equal(&of("tanh", "exp"), &of("tanh", "sin")));
    // A parameter may have the name of a state.
    let state = "%s: f32[4] = state {init = 0.0, name = \"step\", ty = {\"dtype\":\"f32\",\"shape\":[4]}} @update";
    let carried = |f: &str| {
        graph(&format!(
            "{}\n{state}\n%a: f32[4] = {f} %v @update\n%b: f32[4] = exp %s @update\n\
             return %a as \"step\" carry %v\nreturn %b as \"step\" carry %s",
            param("step", "v")
        ))
    };
    assert!(is_equal(&carried("tanh"), &carried("tanh")));
    assert!(!is_equal(&carried("tanh"), &carried("sin")));
}

#[test]
fn the_update_does_not_read_what_micro_steps_replace() {
    let of = |metric: &str| {
        graph(&format!(
            "{X}\n%s: f32[] = state {{init = 0.0, name = \"loss_sum\", ty = {{\"dtype\":\"f32\",\"shape\":[]}}}} @backward\n\
             %0: f32[] = reduce %x {{axes = [0], f = \"sum\", keep_dims = false}} @backward\n\
             %y: f32[] = add %s, %0 @backward\n{metric}\nreturn %y as \"loss_sum\" carry %s\nreturn %z as \"loss\" metric"
        ))
    };
    let honest = of("%z: f32[] = abs %y @update");
    assert!(is_equal(&honest, &honest));
    assert!(!is_equal(&honest, &of("%1: f32[] = add %s, %0 @update\n%z: f32[] = abs %1 @update")));
}

#[test]
fn gradients_that_are_still_to_be_taken_are_kept() {
    let param = |name: &str| {
        format!(
            "%{name}: f32[4, 4] = param {{init = \"weights\", kind = \"trainable\", name = \"{name}\", reason = \"\", \
             ty = {{\"dtype\":\"f32\",\"shape\":[4, 4]}}}}"
        )
    };
    let ids = "%i: i64[4] = input {name = \"i\", ty = {\"dtype\":\"i64\",\"shape\":[4]}}";
    let zero = "%z: f32[] = constant {splat = 0.0, ty = {\"dtype\":\"f32\",\"shape\":[]}}";
    let of = |nodes: &str| {
        graph(&format!(
            "{}\n{}\n{ids}\n{zero}\n{nodes}\n%l: f32[] = reduce %y {{axes = [0, 1], f = \"sum\", keep_dims = false}}\n\
             return %l as \"loss_sum\" loss_sum",
            param("t"),
            param("v")
        ))
    };
    let plain = of("%y: f32[4, 4] = embedding %t, %i {}");
    let same = |other: &Graph, before: bool| {
        [Comparer::of_bits(), Comparer::of_real_numbers()].iter_mut().any(|comparer| {
            comparer.before_gradients(before).compare(&plain, other, Ranks::ONE).is_empty()
        })
    };
    // A row without a gradient, and a parameter that the loss depends on by a factor of 0.
    let padded = of("%y: f32[4, 4] = embedding %t, %i {padding_idx = 0}");
    let more = of(
        "%e: f32[4, 4] = embedding %t, %i {}\n%o: f32[4, 4] = mul %v, %z\n%y: f32[4, 4] = add %e, %o",
    );
    for other in [padded, more] {
        assert!(!same(&other, true));
        assert!(same(&other, false));
    }
    assert!(same(&plain, true));
    // What is never chosen does not count.
    let chosen = of(
        "%one: bool[] = constant {splat = 1, ty = {\"dtype\":\"bool\",\"shape\":[]}}\n%e: f32[4, 4] = embedding %t, %i {}\n\
         %y: f32[4, 4] = select %one, %e, %v",
    );
    assert!(same(&chosen, true));
}

#[test]
fn rows_may_be_stacked_again() {
    let of = |nodes: &str| {
        graph(&format!(
            "%x: f32[2, 3] = input {{name = \"x\", ty = {{\"dtype\":\"f32\",\"shape\":[2, 3]}}}}\n\
             %a: f32[1, 3] = slice %x {{size = [1,3], start = [0,0], step = [1,1]}}\n\
             %b: f32[1, 3] = slice %x {{size = [1,3], start = [1,0], step = [1,1]}}\n{nodes}\nreturn %y as \"y\" gradient"
        ))
    };
    let apart = |c: &str, d: &str| {
        of(&format!(
            "%c: f32[3] = reshape %a {{shape = [3]}}\n%d: f32[3] = reshape %b {{shape = [3]}}\n\
             %e: f32[1, 3] = reshape {c} {{shape = [1,3]}}\n%f: f32[1, 3] = reshape {d} {{shape = [1,3]}}\n\
             %y: f32[2, 3] = concat %e, %f {{axis = 0}}"
        ))
    };
    let whole = of("%y: f32[2, 3] = concat %a, %b {axis = 0}");
    assert!(is_equal(&whole, &apart("%c", "%d")));
    assert!(!is_equal(&whole, &apart("%d", "%c")));
}
