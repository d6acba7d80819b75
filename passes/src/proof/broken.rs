//! Wrong rules are not proved: what the solver must see through, by family.

use super::Solver;
use super::elements::Elements;
use super::encode::{Encoder, SIZES};
use super::pattern::graph;
use super::rules::side_by_side;
use easy_smt::Response;

/// Left side, wrong right side of the same type, and the reading. The leaves of both sides are those of the left one.
const WRONG: &[(&str, &str, Elements)] = &[
    // Permutations in the wrong order, an axis off by one, an operand exchanged.
    (
        "transpose{perm=[1,2,0]}(transpose{perm=[0,2,1]}(x:f32[a,a,a]))",
        "transpose{perm=[1,0,2]}(x:f32[a,a,a])",
        Elements::Any,
    ),
    ("transpose{perm=[1,0]}(x:f32[a,a])", "x:f32[a,a]", Elements::Any),
    ("transpose{perm=[1,0]}(x:f32[a,b])", "reshape{shape=[b,a]}(x:f32[a,b])", Elements::Any),
    (
        "reshape{shape=[a,b,c,d]}(transpose{perm=[0,2,1]}(reshape{shape=[a*b,d,c]}(x:f32[b,a,d,c])))",
        "transpose{perm=[1,0,3,2]}(x:f32[b,a,d,c])",
        Elements::Any,
    ),
    (
        "slice{start=[1],size=[a],step=[1]}(slice{start=[2],size=[b],step=[2]}(x:f32[d]))",
        "slice{start=[3],size=[a],step=[2]}(x:f32[d])",
        Elements::Any,
    ),
    ("concat{axis=0}(x:f32[a],y:f32[a])", "concat{axis=0}(y:f32[a],x:f32[a])", Elements::Any),
    ("gather{axis=0}(x:f32[a,a],i:i64[a])", "gather{axis=1}(x:f32[a,a],i:i64[a])", Elements::Any),
    (
        "add(expand{shape=[a,a]}(x:f32[a,1]),y:f32[a,a])",
        "add(reshape{shape=[1,a]}(x:f32[a,1]),y:f32[a,a])",
        Elements::Any,
    ),
    ("sub(x:f32[a],y:f32[a])", "sub(y:f32[a],x:f32[a])", Elements::Any),
    ("select(0:bool[],x:f32[a],y:f32[a])", "x:f32[a]", Elements::Any),
    ("or(x:bool[a],0:bool[])", "0:bool[a]", Elements::Any),
    (
        "pad{low=[a],high=[0],value=0.0}(x:f32[b])",
        "pad{low=[0],high=[a],value=0.0}(x:f32[b])",
        Elements::Any,
    ),
    // Flags and operands of matmuls; the order of operands matters without a transpose.
    (
        "matmul{trans_a=false,trans_b=false}(transpose{perm=[1,0]}(x:f32[a,a]),y:f32[a,a])",
        "matmul{trans_a=false,trans_b=true}(x:f32[a,a],y:f32[a,a])",
        Elements::Any,
    ),
    (
        "matmul{trans_a=false,trans_b=false}(x:f32[a,a],y:f32[a,a])",
        "matmul{trans_a=false,trans_b=false}(y:f32[a,a],x:f32[a,a])",
        Elements::Any,
    ),
    (
        "transpose{perm=[1,0]}(matmul{trans_a=false,trans_b=false}(x:f32[a,a],y:f32[a,a]))",
        "matmul{trans_a=true,trans_b=true}(x:f32[a,a],y:f32[a,a])",
        Elements::Any,
    ),
    ("softmax{axis=0}(x:f32[a,a])", "softmax{axis=1}(x:f32[a,a])", Elements::Any),
    // Casts and collectives: a rounding is not dropped, a shard is not another.
    (r#"cast{to="f32"}(cast{to="bf16"}(x:f32[a]))"#, "x:f32[a]", Elements::Any),
    (
        r#"all_gather{unit=0}(cast{to="f32"}(cast{to="bf16"}($w:f32[a])))"#,
        "all_gather{unit=0}($w:f32[a])",
        Elements::Any,
    ),
    (
        "cross_entropy{ignore_index=-100}(slice{start=[0,1],size=[a,b],step=[1,1]}(x:f32[a,c]),l:i64[a])",
        "cross_entropy{ignore_index=-100,classes=b}(x:f32[a,c],l:i64[a])",
        Elements::Any,
    ),
    (
        "cross_entropy{ignore_index=-100}(slice{start=[0,0],size=[a,b],step=[1,1]}(x:f32[a,c]),l:i64[a])",
        "cross_entropy{ignore_index=-100}(x:f32[a,c],l:i64[a])",
        Elements::Any,
    ),
    // The sign of zero, NaN, infinities, overflow, rounding.
    ("add(x:f32[],0:f32[])", "x:f32[]", Elements::Floats),
    ("sub(x:f32[],-0:f32[])", "x:f32[]", Elements::Floats),
    ("mul(x:f32[],0:f32[])", "0:f32[]", Elements::Floats),
    ("sub(x:f16[],x)", "0:f16[]", Elements::Floats),
    ("div(x:f16[],x)", "1:f16[]", Elements::Floats),
    ("eq(x:f32[],x)", "1:bool[]", Elements::Floats),
    ("sub(add(x:f16[],y:f16[]),y)", "x:f16[]", Elements::Floats),
    (
        "mul(mul(x:f8e5m2[],y:f8e5m2[]),2:f8e5m2[])",
        "mul(x:f8e5m2[],mul(y:f8e5m2[],2:f8e5m2[]))",
        Elements::Floats,
    ),
    ("neg(sub(x:f16[],y:f16[]))", "sub(y:f16[],x:f16[])", Elements::Floats),
    (
        r#"cast{to="bf16"}(cast{to="f16"}(x:f32[]))"#,
        r#"cast{to="bf16"}(x:f32[])"#,
        Elements::Floats,
    ),
    (r#"cast{to="f16"}(cast{to="bf16"}(x:f16[]))"#, "x:f16[]", Elements::Floats),
    (r#"cast{to="u8"}(cast{to="f64"}(x:i32[]))"#, r#"cast{to="u8"}(x:i32[])"#, Elements::Floats),
    ("div(mul(x:i32[],2:i32[]),2:i32[])", "x:i32[]", Elements::Floats),
    // Composites: a sign, a factor, an epsilon, an operand, a mask.
    ("log(sigmoid(x:f32[a]))", "softplus(neg(x:f32[a]))", Elements::Reals),
    ("mul(x:f32[a],sigmoid(x))", "gelu(x:f32[a])", Elements::Reals),
    (
        "r=add(reduce{f=\"mean\",axes=[1],keep_dims=true}(mul(x:f32[a,b],x)),0.125:f32[]);mul(div(x,sqrt(r)),s:f32[b])",
        "rms_norm{axis=1,eps=0.25}(x:f32[a,b],s:f32[b])",
        Elements::Reals,
    ),
    (
        "r=add(reduce{f=\"mean\",axes=[1],keep_dims=true}(mul(x:f32[a,b],x)),0.125:f32[]);mul(div(x,sqrt(r)),s:f32[b])",
        "layer_norm{axis=1,eps=0.125}(x:f32[a,b],s:f32[b])",
        Elements::Reals,
    ),
    (
        "e=exp(sub(x:f32[a,a],reduce{f=\"max\",axes=[1],keep_dims=true}(x)));div(e,reduce{f=\"sum\",axes=[0],keep_dims=true}(e))",
        "softmax{axis=1}(x:f32[a,a])",
        Elements::Reals,
    ),
    (
        "s=mul(matmul{trans_a=false,trans_b=true}(q:f32[a,b,c,d],k:f32[a,b,e,d]),0.25:f32[]);matmul{trans_a=false,trans_b=false}(softmax{axis=3}(s),v:f32[a,b,e,f])",
        "attention{scale=0.5}(q:f32[a,b,c,d],k:f32[a,b,e,d],v:f32[a,b,e,f])",
        Elements::Reals,
    ),
    (
        "s=matmul{trans_a=false,trans_b=true}(q:f32[a,b,c,d],k:f32[a,b,c,d]);matmul{trans_a=false,trans_b=false}(softmax{axis=3}(s),v:f32[a,b,c,f])",
        "attention{scale=1.0}(k:f32[a,b,c,d],q:f32[a,b,c,d],v:f32[a,b,c,f])",
        Elements::Reals,
    ),
    (
        "neg(gather_elements{axis=1}(log_softmax{axis=1}(x:f32[a,b]),l:i64[a,1]))",
        "reshape{shape=[a,1]}(cross_entropy{ignore_index=0}(x:f32[a,b],reshape{shape=[a]}(l:i64[a,1])))",
        Elements::Reals,
    ),
];

#[test]
fn wrong_rules_are_not_proved() {
    let Some(mut solver) = Solver::find() else { return };
    let mut proved = Vec::new();
    for (before, after, elements) in WRONG {
        let of = |text: &str| graph(text, SIZES).unwrap_or_else(|e| panic!("{text}: {e}"));
        let (joined, roots) = side_by_side(&of(before), &of(after));
        assert_eq!(joined.ty(roots[0]), joined.ty(roots[1]), "{before} and {after}");
        let found = Encoder::differ(&mut solver, &joined, *elements, roots);
        // Over the reals the solver may not find an example; it must not find that there is none.
        let refuted =
            found == Response::Sat || (*elements == Elements::Reals && found == Response::Unknown);
        if !refuted {
            proved.push(format!("{before} = {after}: {found:?}"));
        }
    }
    assert!(proved.is_empty(), "not refuted:\n{}", proved.join("\n"));
}
