//! A real language model of 135 M parameters against plain PyTorch. `GRADPRISM_SMOLLM2` names the
//! checkpoint, which the README says how to make; it is too large to keep here.

mod common;

use common::{assert_close, config, gradprism, stderr};
use serde_json::Value;

fn golden(name: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

#[test]
fn the_split_of_smollm2_is_that_of_plain_pytorch() {
    let Some(checkpoint) = std::env::var_os("GRADPRISM_SMOLLM2") else {
        eprintln!("SKIPPED: set GRADPRISM_SMOLLM2 to a TorchScript file of SmolLM2-135M");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let rollouts = folder.path().join("rollouts.jsonl");
    // Two groups of known numbers, and a third of equal rewards.
    let text = std::fs::read_to_string(golden("smollm2_rollouts.jsonl")).unwrap();
    let lines: Vec<&str> = text.lines().take(24).collect();
    std::fs::write(&rollouts, lines.join("\n")).unwrap();
    let out = folder.path().join("out");
    let mut command = gradprism(&["study", "--quiet"]);
    let output = command
        .env_remove("OMP_NUM_THREADS")
        .arg(config("smollm2.yaml"))
        .arg("--set")
        .arg(format!("policy.checkpoint={}", checkpoint.to_string_lossy()))
        .arg("--set")
        .arg(format!("rollouts.path={}", rollouts.display()))
        .arg("--out")
        .arg(&out)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));

    let parse = |text: &str| -> Value { serde_json::from_str(text).unwrap() };
    let read = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
    let groups: Vec<Value> = read(&out.join("prompts.jsonl")).lines().map(parse).collect();
    let known = parse(&read(&golden("smollm2_decomposition.json")));
    let number = |value: &Value| value.as_f64().unwrap();
    for (group, known) in groups.iter().zip(known["groups"].as_array().unwrap()) {
        assert_eq!(group["group_id"], known["group_id"]);
        let task_sq = number(&known["task_norm"]).powi(2);
        for key in ["task_norm", "kl_unit_norm", "entropy_unit_norm", "reg_norm", "total_norm"] {
            let expected = number(&known[key]);
            assert_close(number(&group[key]), expected, 1e-3, expected, key);
        }
        for key in ["signal_sq", "noise_sq"] {
            assert_close(number(&group[key]), number(&known[key]), 1e-3, task_sq, key);
        }
        assert_close(
            number(&group["cos_task_reg"]),
            number(&known["cos_task_reg"]),
            1e-3,
            1.0,
            "cos",
        );
        let norms = |group: &Value| -> Vec<f64> {
            group["trajectory_task_norms"].as_array().unwrap().iter().map(number).collect()
        };
        for (found, expected) in norms(group).into_iter().zip(norms(known)) {
            assert_close(found, expected, 1e-3, expected, "trajectory_task_norms");
        }
    }
    assert_eq!(groups[2]["reward_variance"], 0.0);
    assert_eq!(groups[2]["task_norm"], 0.0);
    let summary = parse(&read(&out.join("summary.json")));
    assert_eq!(summary["policy"]["parameters"], 134_515_008);
}
