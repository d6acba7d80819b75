//! Every lint of a graph: a case that it finds, and one like it that it does not.

use super::*;
use frit_ir::plan::DeviceType;
use frit_ir::{Shape, text};

const CPU: &str = "znver5";

/// Facts that no lint objects to.
struct Plain {
    target: Target,
    inputs: BTreeMap<String, (f64, f64)>,
    stored: Option<DType>,
    values: f32,
}

impl Default for Plain {
    fn default() -> Self {
        let target = Target { device: DeviceType::Cpu, arch: CPU.into(), features: String::new() };
        Plain { target, inputs: BTreeMap::new(), stored: None, values: 0.1 }
    }
}

impl Plain {
    /// The ids found in a graph, with these facts changed.
    fn found(&self, body: &str, change: impl Fn(&mut Facts<'_>)) -> Vec<Diagnostic> {
        let graph = text::parse(&format!("graph @g world=1 {{\n{body}\n}}"));
        let graph = graph.unwrap_or_else(|e| panic!("{e}"));
        let stored = |_: &str| self.stored;
        let spread =
            |p: &Param| Some(Spread::of(&vec![self.values; p.ty.shape.numel()], &p.ty.shape));
        let mut facts = Facts {
            target: &self.target,
            compute: DType::BF16,
            reduce: DType::F32,
            gather: None,
            sharded: true,
            ranks: 4,
            accumulation: 1,
            scaling: LossScaling::None,
            decay: None,
            inputs: &self.inputs,
            stored: &stored,
            spread: &spread,
        };
        change(&mut facts);
        forward(&graph, &facts)
    }

    fn ids(&self, body: &str, change: impl Fn(&mut Facts<'_>)) -> Vec<String> {
        self.found(body, change).into_iter().map(|d| d.code).collect()
    }
}

fn ids(body: &str, change: impl Fn(&mut Facts<'_>)) -> Vec<String> {
    Plain::default().ids(body, change)
}

/// A matmul in this dtype of an input with a parameter, over `k` elements.
fn matmul(dtype: &str, k: usize) -> String {
    format!(
        "%x: f32[4, {k}] = input {{name = \"x\", ty = {{\"dtype\": \"f32\", \"shape\": [4, {k}]}}}}
%w: f32[{k}, 8] = param {{name = \"w\", ty = {{\"dtype\": \"f32\", \"shape\": [{k}, 8]}}, kind = \"trainable\", reason = \"\", init = \"weights\"}}
%a: {dtype}[4, {k}] = cast %x {{to = \"{dtype}\"}}
%b: {dtype}[{k}, 8] = cast %w {{to = \"{dtype}\"}}
%y: {dtype}[4, 8] = matmul %a, %b loc(\"node\", \"h.3.attn\", \"\")
return %y as \"y\""
    )
}

const DYNAMIC: LossScaling = LossScaling::Dynamic {
    init_scale: 65536.0,
    growth_factor: 2.0,
    backoff_factor: 0.5,
    growth_interval: 2000.0,
};

#[test]
fn l02_and_l03_loss_scaling() {
    let scaled = |scaling| move |f: &mut Facts<'_>| f.scaling = scaling;
    let f16 = matmul("f16", 16);
    let found = Plain::default().found(&f16, scaled(LossScaling::None));
    assert_eq!((found[0].code.as_str(), found[0].severity), ("L02", Severity::Error));
    assert!(found[0].help.as_ref().is_some_and(|h| h.contains("loss_scale")));
    assert_eq!(ids(&f16, scaled(LossScaling::Static(1024.0))), ["L03"]);
    assert!(ids(&f16, scaled(DYNAMIC)).is_empty());
    assert!(ids(&matmul("bf16", 16), scaled(LossScaling::None)).is_empty());
    assert!(ids(&matmul("bf16", 16), scaled(LossScaling::Static(8.0))).is_empty());
}

#[test]
fn l10_bf16_needs_sm_80() {
    let on = |arch: &str, dtype: &str| {
        let mut plain = Plain::default();
        plain.target.arch = arch.into();
        plain.ids(&matmul(dtype, 16), |f| f.scaling = DYNAMIC)
    };
    assert_eq!(on("sm_75", "bf16"), ["L10"]);
    assert!(on("sm_75", "f16").is_empty());
    assert!(on("sm_80", "bf16").is_empty());
    assert!(on(CPU, "bf16").is_empty());
}

#[test]
fn l11_two_low_precisions() {
    let both = format!(
        "{}\n%c: f16[4, 8] = cast %y {{to = \"f16\"}}\n%z: f16[4, 8] = exp %c\nreturn %z as \"z\"",
        matmul("bf16", 16)
    );
    let found = Plain::default().found(&both, |f| f.scaling = DYNAMIC);
    assert_eq!((found[0].code.as_str(), found[0].severity), ("L11", Severity::Error));
    // A result that is only stored in the other one computes nothing in it.
    let stored = format!(
        "{}\n%c: f16[4, 8] = cast %y {{to = \"f16\"}}\nreturn %c as \"z\"",
        matmul("bf16", 16)
    );
    assert!(ids(&stored, |f| f.scaling = DYNAMIC).is_empty());
}

#[test]
fn l12_reductions_in_low_precision() {
    let reduce = |dtype, ranks, accumulation| {
        ids(&matmul("bf16", 16), move |f| {
            (f.reduce, f.ranks, f.accumulation) = (dtype, ranks, accumulation);
        })
    };
    assert_eq!(reduce(DType::F16, 2, 1), ["L12"]);
    assert!(reduce(DType::F16, 1, 1).is_empty());
    assert_eq!(reduce(DType::BF16, 16, 8), ["L12"]);
    assert!(reduce(DType::BF16, 16, 4).is_empty());
    assert!(reduce(DType::F32, 1024, 8).is_empty());
}

#[test]
fn l13_parameters_gathered_in_fp32() {
    let gather =
        |dtype, ranks| ids(&matmul("bf16", 16), move |f| (f.gather, f.ranks) = (dtype, ranks));
    assert_eq!(gather(Some(DType::F32), 4), ["L13"]);
    assert!(gather(Some(DType::F32), 1).is_empty());
    assert!(gather(Some(DType::BF16), 4).is_empty());
    assert!(gather(None, 4).is_empty());
}

#[test]
fn l14_stored_in_low_precision() {
    let stored = |dtype| {
        let plain = Plain { stored: dtype, ..Plain::default() };
        plain.ids(&matmul("bf16", 16), |_| {})
    };
    assert_eq!(stored(Some(DType::F16)), ["L14"]);
    assert!(stored(Some(DType::F32)).is_empty());
    assert!(stored(None).is_empty());
}

/// A mask of `fill`, added to another one of `fill` before the softmax of scores.
fn masks(fill: &str, other: &str) -> String {
    format!(
        "%s: f32[4, 8] = input {{name = \"s\", ty = {{\"dtype\": \"f32\", \"shape\": [4, 8]}}}}
%m: bool[4, 8] = input {{name = \"m\", ty = {{\"dtype\": \"bool\", \"shape\": [4, 8]}}}}
%p: f32[4, 8] = input {{name = \"p\", ty = {{\"dtype\": \"f32\", \"shape\": [4, 8]}}}}
%z: f32[] = constant {{ty = {{\"dtype\": \"f32\", \"shape\": []}}, splat = 0.0}}
%f: f32[] = constant {{ty = {{\"dtype\": \"f32\", \"shape\": []}}, splat = {fill}}}
%g: f32[] = constant {{ty = {{\"dtype\": \"f32\", \"shape\": []}}, splat = {other}}}
%a: f32[4, 8] = select %m, %z, %f
%b: f32[4, 8] = mul %p, %g
%c: f32[4, 8] = add %a, %b
%d: f32[4, 8] = add %s, %c
%y: f32[4, 8] = softmax %d {{axis = 1}}
return %y as \"y\""
    )
}

#[test]
fn l18_masks_that_are_added() {
    let found = Plain::default().found(&masks("-3.4028235e38", "-3.4028235e38"), |_| {});
    assert_eq!(found[0].code, "L18");
    assert!(found[0].help.as_ref().is_some_and(|h| h.contains("where")), "the rewrite");
    assert!(ids(&masks("-3.4028235e38", "-10000.0"), |_| {}).is_empty());
    assert!(ids(&masks("-1e9", "-1e9"), |_| {}).is_empty());
    // Without a softmax an infinite sum excludes nothing.
    let no_softmax =
        masks("-3.4028235e38", "-3.4028235e38").replace("softmax %d {axis = 1}", "tanh %d");
    assert!(ids(&no_softmax, |_| {}).is_empty());
}

#[test]
fn l18_weights_beyond_their_dtype() {
    let weights = |values, dtype| {
        let plain = Plain { values, ..Plain::default() };
        plain.ids(&matmul(dtype, 16), |f| f.scaling = DYNAMIC)
    };
    assert_eq!(weights(1e5, "f16"), ["L18"]);
    assert_eq!(weights(1e-9, "f16"), ["L18"]);
    assert!(weights(1e-3, "f16").is_empty());
    assert!(weights(1e5, "bf16").is_empty());
}

#[test]
fn l19_matmuls_beyond_f16() {
    let bound = |range: (f64, f64), dtype: &str| {
        let inputs = BTreeMap::from([("x".to_string(), range)]);
        let plain = Plain { inputs, ..Plain::default() };
        plain.found(&matmul(dtype, 1024), |f| f.scaling = DYNAMIC)
    };
    // 1024 terms of 0.1 · 1000.
    let found = bound((-1000.0, 1000.0), "f16");
    assert_eq!((found.len(), found[0].code.as_str()), (1, "L19"));
    assert_eq!(&*found[0].origin.scope, "h.3.attn");
    assert!(found[0].message.contains("1.024e5"), "{}", found[0].message);
    assert!(bound((-100.0, 100.0), "f16").is_empty());
    assert!(bound((-1000.0, 1000.0), "bf16").is_empty());
    // Nothing is known of an input without a declared range.
    assert!(ids(&matmul("f16", 1024), |f| f.scaling = DYNAMIC).is_empty());
}

#[test]
fn l20_losses_of_probabilities() {
    let loss = |lines: &str, first: &str| {
        let body = format!(
            "graph @g world=1 {{
%x: f32[4, 8] = input {{name = \"x\", ty = {{\"dtype\": \"f32\", \"shape\": [4, 8]}}}}
%one: f32[] = constant {{ty = {{\"dtype\": \"f32\", \"shape\": []}}, splat = 1.0}}
%p: f32[4, 8] = {first}
{lines}
%s: f32[] = reduce %t {{f = \"sum\", axes = [0, 1], keep_dims = false}}
return %s as \"loss\"
}}"
        );
        let mut graph = text::parse(&body).unwrap_or_else(|e| panic!("{e}"));
        graph.outputs[0].kind = frit_ir::OutputKind::LossSum;
        let mut found = Findings::default();
        losses::lint(&graph, &mut found);
        found.list().into_iter().map(|d| d.code).collect::<Vec<_>>()
    };
    let log = "%q: f32[4, 8] = sub %one, %p\n%t: f32[4, 8] = log %q";
    assert_eq!(loss("%t: f32[4, 8] = log %p", "sigmoid %x"), ["L20"]);
    assert_eq!(loss(log, "sigmoid %x"), ["L20"]);
    assert!(loss(log, "tanh %x").is_empty());
    assert_eq!(loss("%t: f32[4, 8] = softplus %p", "sigmoid %x"), ["L20"]);
    assert!(loss("%t: f32[4, 8] = softplus %p", "relu %x").is_empty());
    let softmax = "%t: f32[4, 8] = log_softmax %p {axis = 1}";
    assert_eq!(loss(softmax, "softmax %x {axis = 1}"), ["L20"]);
    assert!(loss(softmax, "relu %x").is_empty());
}

#[test]
fn l21_integers_in_floats() {
    let positions = |last: usize, dtype: &str| {
        let values: Vec<String> = (0..=last).map(|i| i.to_string()).collect();
        let n = last + 1;
        let body = format!(
            "%p: i64[{n}] = constant {{ty = {{\"dtype\": \"i64\", \"shape\": [{n}]}}, values = [{}]}}
%q: {dtype}[{n}] = cast %p {{to = \"{dtype}\"}}
return %q as \"y\"",
            values.join(", ")
        );
        ids(&body, |_| {})
    };
    assert_eq!(positions(257, "bf16"), ["L21"]);
    assert!(positions(256, "bf16").is_empty());
    assert_eq!(positions(2049, "f16"), ["L21"]);
    assert!(positions(2048, "f16").is_empty());
    assert!(positions(4096, "f32").is_empty());
}

/// Positions that are an input, times the frequencies of rotations.
#[test]
fn l21_matmuls_of_integers_of_unknown_range() {
    let product = |from: &str, dtype: &str, range: Option<(f64, f64)>| {
        let body = format!(
            "%p: {from}[8, 1] = input {{name = \"p\", ty = {{\"dtype\": \"{from}\", \"shape\": [8, 1]}}}}
%f: {dtype}[1, 4] = constant {{ty = {{\"dtype\": \"{dtype}\", \"shape\": [1, 4]}}, splat = 0.5}}
%c: {dtype}[8, 1] = cast %p {{to = \"{dtype}\"}}
%y: {dtype}[8, 4] = matmul %c, %f
return %y as \"y\""
        );
        let inputs = range.map(|r| ("p".to_string(), r)).into_iter().collect();
        Plain { inputs, ..Plain::default() }.ids(&body, |_| {})
    };
    assert_eq!(product("i64", "bf16", None), ["L21"]);
    assert!(product("i64", "bf16", Some((0.0, 255.0))).is_empty());
    assert!(product("i64", "f32", None).is_empty());
    assert!(product("bool", "bf16", None).is_empty());
    assert!(product("f32", "bf16", None).is_empty());
}

#[test]
fn l22_decay_below_the_resolution() {
    let decay = |x: f64| ids(&matmul("bf16", 16), move |f| f.decay = Some(x));
    assert_eq!(decay(1e-9), ["L22"]);
    assert!(decay(1e-5).is_empty());
    assert!(decay(0.0).is_empty());
}

#[test]
fn l25_a_scalar_that_widens() {
    let scalar = |leaf: &str, shape: &str| {
        let body = format!(
            "%x: bf16{shape} = input {{name = \"x\", ty = {{\"dtype\": \"bf16\", \"shape\": {shape}}}}}
%s: f32[] = {leaf}
%c: f32{shape} = cast %x {{to = \"f32\"}}
%y: f32{shape} = mul %c, %s
return %y as \"y\""
        );
        ids(&body, |_| {})
    };
    let param = "param {name = \"s\", ty = {\"dtype\": \"f32\", \"shape\": []}, kind = \"trainable\", reason = \"\", init = \"weights\"}";
    assert_eq!(scalar(param, "[64, 64]"), ["L25"]);
    assert!(scalar(param, "[4, 4]").is_empty());
    let constant = "constant {ty = {\"dtype\": \"f32\", \"shape\": []}, splat = 2.0}";
    assert!(scalar(constant, "[64, 64]").is_empty());
}

#[test]
fn findings_of_repeated_blocks_are_one() {
    let mut found = Findings::default();
    for i in 0..3 {
        found.add("L19", &Origin::new("", &format!("h.{i}.attn")), "matmul", format!("bound {i}"));
    }
    found.add("L19", &Origin::new("", "h.0.mlp"), "matmul", "other".into());
    let list = found.list();
    assert_eq!(list.len(), 2);
    assert_eq!(list[0].notes, ["also in h.1.attn, h.2.attn"]);
}

#[test]
fn an_empty_parameter_has_a_spread() {
    let spread = Spread::of(&[], &Shape::from([0, 4].as_slice()));
    assert_eq!((spread.lo, spread.hi, spread.matrix), (0.0, 0.0, 0.0));
}
