//! Writes the list of CUDA sources for `src/cuda.rs`: every file `cuda/*.cu`, with what it includes in place, since NVRTC gets one text.

use std::path::Path;
use std::{env, fs};

/// What every source begins with.
const PRELUDE: &str = "#include \"ptx.cuh\"\n#include \"numbers.cuh\"\n";

fn main() {
    println!("cargo::rerun-if-changed=cuda");
    let files = fs::read_dir("cuda").expect("the folder of sources");
    let files = files.map(|file| file.expect("a file").file_name().into_string().expect("a name"));
    let mut names: Vec<String> =
        files.filter_map(|file| Some(file.strip_suffix(".cu")?.to_string())).collect();
    names.sort();
    let list: String =
        names.iter().map(|name| format!("({name:?}, {:?}),\n", source(name))).collect();
    let folder = env::var_os("OUT_DIR").expect("a folder to write to");
    fs::write(Path::new(&folder).join("sources.rs"), format!("&[{list}]")).expect("written");
}

fn source(name: &str) -> String {
    let (mut text, mut included) = (String::new(), Vec::new());
    expand(PRELUDE, None, &mut text, &mut included);
    include(&format!("{name}.cu"), &mut text, &mut included);
    text
}

/// Appends a file, if it is not in the text yet.
fn include(file: &str, text: &mut String, included: &mut Vec<String>) {
    if included.iter().any(|other| other == file) {
        return;
    }
    included.push(file.into());
    let lines = fs::read_to_string(Path::new("cuda").join(file));
    let lines = lines.unwrap_or_else(|e| panic!("{file}: {e}"));
    // The instructions come first, and as they are: an emulation replaces them.
    if !text.is_empty() {
        *text += &format!("#line 1 \"{file}\"\n");
    }
    expand(&lines, Some(file), text, included);
}

/// Appends lines of a file, with what they include in place.
fn expand(lines: &str, of: Option<&str>, text: &mut String, included: &mut Vec<String>) {
    for (i, line) in lines.lines().enumerate() {
        let name = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        let Some(name) = name else {
            text.push_str(line);
            text.push('\n');
            continue;
        };
        include(name, text, included);
        if let Some(of) = of {
            *text += &format!("#line {} \"{of}\"\n", i + 2);
        }
    }
}
