//! What the environments are made of: the answer in its tags, the count of what is invalid,
//! arithmetic, files of tasks, and their sections of a configuration. Each under garbage too.

use gradprism::config::EnvironmentConfig;
use gradprism::env::{
    Answer, Comparison, CountdownTask, End, Environment, Episode, Expression, Grade, Group,
    Rational, Rules, Seed, Tags, grade,
};
use gradprism::{Error, Result};
use proptest::prelude::*;

fn environment(yaml: &str) -> Result<Box<dyn Environment>> {
    serde_yaml::from_str::<EnvironmentConfig>(yaml)
        .map_err(|error| Error::config("test", error.to_string()))?
        .environment()
}

/// A straight way: the goal is two steps to the right.
const STRAIGHT: &str = "{name: frozen_lake, slip: 0, map: [SFGF]}";

fn start(yaml: &str, rules: Rules) -> Episode {
    Episode::start(environment(yaml).unwrap(), rules, Seed::default()).unwrap()
}

// --- tags ---

fn answer(reasoning: Option<&str>, text: &str, response: &str) -> Option<Answer> {
    let reasoning = reasoning.map(|part| {
        let start = response.find(part).unwrap();
        start..start + part.len()
    });
    Some(Answer { reasoning, text: text.into() })
}

#[test]
fn the_answer_is_what_the_patterns_of_ragen_find() {
    for (response, reasoning, text) in [
        ("<think>a b</think><answer>Left || Up</answer>", "a b", "Left || Up"),
        ("well <think>a b</think> \n\t<answer>\n Left\n</answer> or so", "a b", "Left"),
        // The first answer that directly follows a thought; a thought may hold the end of another.
        ("<think>a</think> so <think>b</think><answer>1</answer>", "a</think> so <think>b", "1"),
        ("<think>q</think><answer>1</answer><think>r</think><answer>2</answer>", "q", "1"),
        // Tags inside an answer are deleted.
        ("<think>q</think><answer><answer> 1 <|im_end|></answer>", "q", "1"),
        ("<think>ä</think><answer>√</answer>", "ä", "√"),
    ] {
        assert_eq!(Tags::ThinkAnswer.parse(response), answer(Some(reasoning), text, response));
    }
    for response in [
        "",
        "Left",
        "<answer>Left</answer>",
        "<think>a</think>Left",
        "<think>a</think> so <answer>Left</answer>",
        "<think>a<answer>Left</answer>",
        "<think>a</think><answer>Left",
        "<THINK>a</THINK><ANSWER>Left</ANSWER>",
    ] {
        assert_eq!(Tags::ThinkAnswer.parse(response), None, "{response}");
    }
    let response = "no thought <answer> Left </answer><answer>Up</answer>";
    assert_eq!(Tags::Answer.parse(response), answer(None, "Left", response));
    assert_eq!(Tags::Answer.parse("Left"), None);
    assert_eq!(Tags::None.parse(" Left\n"), answer(None, "Left", ""));
}

// --- what is counted ---

#[test]
fn a_turn_is_fined_once_for_a_broken_form_or_an_invalid_action() {
    // (response, well formed, taken, invalid, reward, penalty)
    let mut episode = start(STRAIGHT, Rules { max_turns: 9, ..Rules::default() });
    for (response, well_formed, taken, invalid, reward, penalty) in [
        ("Right", false, 0, 0, 0.0, 0.1),
        ("<think></think><answer></answer>", true, 0, 0, 0.0, 0.1),
        ("<think></think><answer> || </answer>", true, 0, 0, 0.0, 0.1),
        ("<think></think><answer>jump || fly</answer>", true, 0, 2, 0.0, 0.1),
        // The rest is taken all the same; a third action is not read.
        ("<think></think><answer>jump || right || Right</answer>", true, 1, 1, 0.0, 0.1),
        // An invalid action counts after the end too.
        ("<think></think><answer>RIGHT || sit</answer>", true, 1, 1, 1.0, 0.1),
    ] {
        let turn = episode.respond(response).unwrap();
        assert_eq!(
            (turn.well_formed, turn.actions.len(), turn.invalid, turn.reward, turn.penalty),
            (well_formed, taken, invalid, reward, penalty),
            "{response}"
        );
    }
    assert_eq!((episode.end(), episode.success()), (Some(End::Done), true));
    assert_eq!((episode.invalid_actions(), episode.malformed()), (4, 1));
    assert!((episode.total_reward() - 0.4).abs() < 1e-12);
    let message = episode.respond("more").unwrap_err().to_string();
    assert!(message.contains("after the end"), "{message}");
}

#[test]
fn turns_and_actions_are_limited() {
    let respond = |rules: Rules, answers: &[&str]| {
        let mut episode = start(STRAIGHT, rules);
        for answer in answers {
            assert_eq!(episode.end(), None);
            episode.respond(&Tags::ThinkAnswer.wrap("", answer)).unwrap();
        }
        let taken: Vec<usize> = episode.turns().iter().map(|turn| turn.actions.len()).collect();
        (episode.end(), taken, episode.total_reward())
    };
    let rules = Rules::default();
    // Of two actions one is left: the goal is not reached by the second.
    let three = Rules { max_actions: Some(3), ..rules.clone() };
    let walk = ["Left || Right", "Right || Right"];
    assert_eq!(respond(three, &walk[..]), (Some(End::Done), vec![2, 1], 1.0));
    let walk = ["Left || Left", "Right || Right"];
    let three = Rules { max_actions: Some(3), ..rules.clone() };
    assert_eq!(respond(three, &walk), (Some(End::ActionLimit), vec![2, 1], 0.0));
    let two = Rules { max_turns: 2, ..rules.clone() };
    assert_eq!(respond(two, &["Left", "Left"]), (Some(End::TurnLimit), vec![1, 1], 0.0));
    // RAGEN's ten actions of a walk.
    assert_eq!(
        respond(rules, &["Left||Left"; 5]),
        (Some(End::ActionLimit), vec![2, 2, 2, 2, 2], 0.0)
    );
    for rules in [
        Rules { max_turns: 0, ..Rules::default() },
        Rules { max_actions: Some(0), ..Rules::default() },
        Rules { max_actions_per_turn: 0, ..Rules::default() },
        Rules { separator: " ".into(), ..Rules::default() },
        Rules { format_penalty: -0.1, ..Rules::default() },
        Rules { format_penalty: f64::NAN, ..Rules::default() },
    ] {
        let environment = environment(STRAIGHT).unwrap();
        assert!(Episode::start(environment, rules, Seed::default()).is_err());
    }
}

#[test]
fn a_message_says_what_a_policy_must_know() {
    let mut episode = start(STRAIGHT, Rules::default());
    assert_eq!(
        episode.message(),
        "You are on a frozen lake. Walk to the goal and keep out of the holes.\n\
         P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal.\n\
         Actions: Left, Down, Right, Up. At most 2 at once, joined by \"||\".\n\n\
         Turn 1\nState:\nP_G_\n10 actions left. Answer as \
         <think>your thoughts</think><answer>your answer</answer> and write nothing else.\n"
    );
    episode.respond("<think>hm</think><answer>Right</answer>").unwrap();
    assert_eq!(&episode.turns()[0].response[episode.turns()[0].reasoning.clone().unwrap()], "hm");
    assert_eq!(
        episode.message(),
        "Reward: 0.0\n\nTurn 2\nState:\n_PG_\n9 actions left. Answer as \
         <think>your thoughts</think><answer>your answer</answer> and write nothing else.\n"
    );
}

/// An environment whose prompt depends on the trajectory: a group must refuse it.
struct Leaky(u64);

impl Environment for Leaky {
    fn name(&self) -> &str {
        "leaky"
    }
    fn instruction(&self) -> String {
        String::new()
    }
    fn answers(&self) -> gradprism::env::Answers {
        gradprism::env::Answers::Text
    }
    fn max_actions(&self) -> usize {
        1
    }
    fn reset(&mut self, seed: Seed) -> Result<()> {
        self.0 = seed.trajectory;
        Ok(())
    }
    fn observe(&self) -> String {
        self.0.to_string()
    }
    fn act(&mut self, _: &str) -> Result<Option<gradprism::env::Outcome>> {
        Err(Error::Environment { name: "leaky".into(), problem: "the line is dead".into() })
    }
    fn fork(&self) -> Result<Box<dyn Environment>> {
        Ok(Box::new(Self(0)))
    }
}

#[test]
fn a_group_refuses_two_prompts_and_an_environment_may_fail() {
    let error = Group::start(&Leaky(0), &Rules::default(), 2, 9, 0).err().unwrap().to_string();
    assert!(error.contains("leaky") && error.contains("task 9"), "{error}");
    let mut one = Group::start(&Leaky(0), &Rules::default(), 1, 9, 0).unwrap();
    // An environment lives on a thread of its own if one likes.
    let message = std::thread::spawn(move || {
        let response = one.episodes[0].respond("<think></think><answer>x</answer>");
        response.err().unwrap().to_string()
    });
    assert_eq!(message.join().unwrap(), "environment leaky: the line is dead");
}

// --- arithmetic ---

fn value(text: &str) -> Option<Rational> {
    Expression::parse(text).unwrap_or_else(|error| panic!("{text}: {error}")).value()
}

#[test]
fn expressions_come_to_what_one_works_out_by_hand() {
    for (text, above, below) in [
        ("2 + 3 * 4", 14, 1),
        ("(2 + 3) * 4", 20, 1),
        ("10 - 4 - 3", 3, 1),
        ("10 - (4 - 3)", 9, 1),
        ("24 / 4 / 3", 2, 1),
        ("8 / (3 - 8 / 3)", 24, 1),
        ("1 / 3 + 1 / 6", 1, 2),
        ("- 3 + 5 + 2", 4, 1),
        ("2 * -3", -6, 1),
        ("--+-7", -7, 1),
        ("-(2 + 3) / 10", -1, 2),
        ("\t0*5\n", 0, 1),
        ("18446744073709551615", 18_446_744_073_709_551_615, 1),
    ] {
        assert_eq!(value(text), Rational::new(above, below), "{text}");
    }
    for text in ["1 / 0", "1 / (2 - 2)", "0 / 0"] {
        assert_eq!(value(text), None, "{text}");
    }
    // 2^64 to the third power exceeds 128 bits: no value, no panic.
    assert_eq!(value(&["18446744073709551615"; 3].join("*")), None);
    for text in [
        "",
        " ",
        "()",
        "1 +",
        "* 1",
        "1 2",
        "2(3)",
        "(1",
        "1)",
        "2 ** 3",
        "7 // 2",
        "7 % 2",
        "1.5",
        "1_0",
        "07",
        "00",
        "0x1",
        "1e3",
        "18446744073709551616",
        "1 = 1",
        "−1",
        "٣",
        "abs(1)",
        "1;2",
    ] {
        assert!(Expression::parse(text).is_err(), "{text}");
    }
}

#[test]
fn neither_depth_nor_length_costs_the_stack() {
    let deep = |depth: usize| format!("{}1{}", "(".repeat(depth), ")".repeat(depth));
    assert_eq!(value(&deep(64)), Rational::new(1, 1));
    for depth in [65, 1_000_000] {
        let error = Expression::parse(&deep(depth)).unwrap_err().to_string();
        assert!(error.contains("nested"), "{error}");
    }
    assert_eq!(value(&format!("{}1", "-".repeat(1_000_001))), Rational::new(-1, 1));
    assert_eq!(value(&["1"; 200_000].join("+")), Rational::new(200_000, 1));
    assert_eq!(value(&["1"; 200_000].join("-")), Rational::new(-199_998, 1));
}

#[test]
fn an_answer_is_graded_by_its_numbers_and_its_value() {
    let task = CountdownTask { target: 24, nums: vec![3, 3, 8, 8] };
    for (answer, all, some) in [
        ("8 / (3 - 8 / 3)", Grade::Right, Grade::Right),
        ("(8 - 3) * 3 + 8", Grade::Missed, Grade::Missed),
        ("8 / (3 - 3) * 8", Grade::Missed, Grade::Missed),
        ("3 * 8", Grade::Unusable, Grade::Right),
        ("3 + 8", Grade::Unusable, Grade::Unusable),
        ("3 + 3 + 3 + 8", Grade::Unusable, Grade::Unusable),
        ("24", Grade::Unusable, Grade::Unusable),
        ("38 - 38", Grade::Unusable, Grade::Unusable),
        ("24 + (3 - 3) * 8 * 8", Grade::Unusable, Grade::Unusable),
        // RAGEN would give 0.1.
        ("3 3 8 8", Grade::Unusable, Grade::Unusable),
    ] {
        assert_eq!(grade(answer, &task, true), all, "{answer}");
        assert_eq!(grade(answer, &task, false), some, "{answer}");
    }
    assert_eq!([Grade::Right, Grade::Missed, Grade::Unusable].map(Grade::reward), [1.0, 0.1, 0.0]);
}

/// An expression as text, and its value worked out by another way: a plain fraction of i128.
fn any_expression() -> impl Strategy<Value = (String, Option<(i128, i128)>, Vec<u64>)> {
    let leaf = (0_u64..100)
        .prop_map(|number| (number.to_string(), Some((i128::from(number), 1)), vec![number]));
    leaf.prop_recursive(3, 12, 2, |inner| {
        (inner.clone(), inner, 0..4_usize, "[ \t]?").prop_map(
            |((left, a, mut used), (right, b, more), operation, space)| {
                used.extend(more);
                let value = a.zip(b).map(|((a, b), (c, d))| match operation {
                    0 => (a * d + c * b, b * d),
                    1 => (a * d - c * b, b * d),
                    2 => (a * c, b * d),
                    _ => (a * d, b * c),
                });
                let sign = ["+", "-", "*", "/"][operation];
                (format!("({left}{space}{sign}{right})"), value.filter(|(_, b)| *b != 0), used)
            },
        )
    })
}

/// Text that is nearly an expression, of numbers that are sometimes given.
fn near_expression() -> impl Strategy<Value = String> {
    let token = prop::sample::select(vec!["1", "2", "3", "12", "+", "-", "*", "/", "(", ")", " "]);
    prop_oneof![
        3 => prop::collection::vec(token, 1..8).prop_map(|tokens| tokens.concat()),
        1 => "[0-9 +*/()-]{0,40}",
        1 => "[0-9a-z.,_=^%!√−×÷+*/() -]{0,40}",
        1 => any::<String>(),
    ]
}

#[test]
fn no_text_makes_the_parser_panic_or_accept_a_number_that_was_not_given() {
    let (mut read, mut rewarded) = (0, 0);
    let cases =
        (near_expression(), prop::collection::vec(1_u32..4, 1..4), -5_i64..9, any::<bool>());
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(20_000) };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let runs = |text: &str| -> Vec<String> {
        let runs = text.split(|sign: char| !sign.is_ascii_digit()).filter(|run| !run.is_empty());
        runs.map(str::to_owned).collect()
    };
    let counts = std::cell::RefCell::new((&mut read, &mut rewarded));
    let outcome = runner.run(&cases, |(text, nums, target, use_all)| {
        let task = CountdownTask { target, nums };
        if let Ok(expression) = Expression::parse(&text) {
            *counts.borrow_mut().0 += 1;
            let signs = "0123456789+-*/() \t\n\r\x0c";
            prop_assert!(text.chars().all(|sign| signs.contains(sign)), "{text}");
            let numbers = expression.numbers().iter().map(u64::to_string).collect::<Vec<_>>();
            prop_assert_eq!(numbers, runs(&text));
        }
        if grade(&text, &task, use_all) != Grade::Unusable {
            *counts.borrow_mut().1 += 1;
            let mut left = task.nums.clone();
            for run in runs(&text) {
                let place = left.iter().position(|given| given.to_string() == run);
                prop_assert!(place.is_some(), "{text} uses {run} of {:?}", task.nums);
                left.swap_remove(place.unwrap());
            }
            prop_assert!(left.is_empty() || !use_all, "{text} leaves {left:?}");
        }
        Ok(())
    });
    outcome.unwrap();
    // The law was tried on texts that are read, and on texts that are rewarded: about 1,750 and 96 of
    // them.
    assert!(read > 500 && rewarded > 30, "{read} {rewarded}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn printed_expressions_come_to_their_values((text, value, used) in any_expression()) {
        let expression = Expression::parse(&text).unwrap();
        prop_assert_eq!(expression.value(), value.and_then(|(a, b)| Rational::new(a, b)));
        prop_assert_eq!(expression.numbers(), used);
    }

    #[test]
    fn fractions_obey_their_laws(a in -99_i128..99, b in 1_i128..99, c in -99_i128..99, d in 1_i128..99) {
        let (x, y) = (Rational::new(a, b).unwrap(), Rational::new(c, -d).unwrap());
        prop_assert_eq!(x.plus(y), y.plus(x));
        prop_assert_eq!(x.minus(y).and_then(|z| z.plus(y)), Some(x));
        prop_assert_eq!(x.over(y).and_then(|z| z.times(y)), (c != 0).then_some(x));
        prop_assert_eq!(Rational::parse(&format!("{a}/{b}")), Some(x));
    }

    #[test]
    fn no_response_makes_an_episode_panic_or_earn_too_much(
        responses in prop::collection::vec(
            prop_oneof![
                any::<String>(),
                "(<think>|</think>|<answer>|</answer>|\\|\\||Left|right|Dragon|[0-9+]| ){0,12}",
                "<think>.{0,5}</think><answer>(Down|Up|Right|x|\\|\\|| ){0,8}</answer>",
            ],
            1..8,
        ),
        task: u64,
        name in prop::sample::select(vec!["bandit", "frozen_lake", "countdown"]),
    ) {
        let mut group =
            Group::start(environment(&format!("name: {name}")).unwrap().as_ref(), &Rules::default(), 2, task, 0)
                .unwrap();
        for episode in &mut group.episodes {
            for response in &responses {
                if episode.end().is_some() {
                    break;
                }
                let turn = episode.respond(response).unwrap();
                prop_assert!(turn.actions.len() + turn.invalid <= 2);
                prop_assert!(turn.well_formed || turn.actions.is_empty());
                prop_assert!((turn.penalty > 0.0) == (turn.invalid > 0 || turn.actions.is_empty()));
                prop_assert!(!episode.message().is_empty());
            }
            prop_assert!((-0.5 - 1e-9..=1.0).contains(&episode.total_reward()));
            prop_assert!(episode.turns().len() <= 5);
        }
    }

    #[test]
    fn no_two_answers_make_a_comparison_panic(a in any::<String>(), b in "[-$0-9.,/% ]{0,12}") {
        for comparison in [Comparison::Text, Comparison::Number] {
            prop_assert_eq!(comparison.equal(&a, &b), comparison.equal(&b, &a));
            prop_assert!(comparison.equal(&b, &b));
        }
    }
}

#[test]
fn numbers_are_compared_as_numbers_only_if_asked() {
    for (a, b, equal) in [
        ("1,000", "1000", true),
        ("$18", "18.00", true),
        ("18.", "18", true),
        ("50 %", "50", true),
        ("1/2", "0.5", true),
        ("-3", "-3.0", true),
        ("1,00", "100", false),
        ("3", "-3", false),
        ("1/0", "1/00", false),
        ("x", "y", false),
    ] {
        assert_eq!(Comparison::Number.equal(a, b), equal, "{a} {b}");
        assert!(!Comparison::Text.equal(a, b), "{a} {b}");
    }
    assert!(Comparison::Text.equal("X = 1", "x=1"));
}

// --- files and sections ---

#[test]
fn a_bad_line_of_a_task_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tasks.jsonl");
    let at = path.display();
    let questions = format!("{{name: questions, path: \"{at}\"}}");
    let countdown = format!("{{name: countdown, tasks: \"{at}\"}}");
    let good = "{\"question\": \"a\", \"answer\": \"b\"}\n";
    for (yaml, text, line, field) in [
        (&questions, "{\"question\": \"a\"}", 1, "answer"),
        (&questions, &format!("{good}\n{{\"question\": \" \", \"answer\": \"b\"}}"), 3, "question"),
        (&questions, &format!("{good}{{\"question\": \"a\", \"answer\": \"b\\nc\"}}"), 2, "answer"),
        (
            &questions,
            &format!("{good}{{\"query\": \"a\", \"response\": \"b #### \"}}"),
            2,
            "answer",
        ),
        (&questions, &format!("{good}nonsense"), 2, "JSON"),
        (&countdown, "{\"target\": 1, \"nums\": []}", 1, "nums"),
        (&countdown, "{\"target\": 1, \"nums\": [-1]}", 1, "-1"),
        (
            &countdown,
            "{\"target\": 1, \"nums\": [4000000000, 4000000000, 4000000000, 4000000000]}",
            1,
            "128",
        ),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = environment(yaml).err().unwrap().to_string();
        assert!(
            error.contains(&format!("tasks.jsonl:{line}:")) && error.contains(field),
            "{error}"
        );
    }
    for text in ["\n \n", "{\"target\": 30, \"nums\": [3, 5, 2]}"] {
        std::fs::write(&path, text).unwrap();
        let error = environment(&countdown).err().unwrap().to_string();
        assert!(error.contains("found none"), "{error}");
    }
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(environment(&questions).err().unwrap().to_string().contains("UTF-8"));
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(environment(&questions).err().unwrap(), Error::Io { .. }));
}

#[test]
fn sections_mean_the_same_when_they_are_written_out_again() {
    for (yaml, full) in [
        (
            "name: bandit",
            "{name: bandit, arms: [{low: Phoenix, high: Dragon}], low_reward: 0.1, high_reward: 1.0, high_probability: 0.25}",
        ),
        (
            "name: frozen_lake",
            "{name: frozen_lake, map: {size: 4, frozen: 0.8}, slip: 0.6666666666666666, view: grid}",
        ),
        (STRAIGHT, "{name: frozen_lake, map: [SFGF], slip: 0.0, view: grid}"),
        (
            "name: countdown",
            "{name: countdown, tasks: {count: [3, 4], max_number: 99, target: [10, 100]}, solvable: signs, use_all: true}",
        ),
        ("{name: questions, path: q.jsonl}", "{name: questions, path: q.jsonl, comparison: text}"),
    ] {
        let config: EnvironmentConfig = serde_yaml::from_str(yaml).unwrap();
        assert_eq!(config, serde_yaml::from_str(full).unwrap());
        let written = serde_yaml::to_string(&config).unwrap();
        assert_eq!(config, serde_yaml::from_str(&written).unwrap(), "{written}");
    }
    let rules: Rules = serde_yaml::from_str("{tags: answer, max_turns: 3}").unwrap();
    assert_eq!(rules, Rules { tags: Tags::Answer, max_turns: 3, ..Rules::default() });
}

#[test]
fn a_section_that_cannot_be_is_refused_with_its_key() {
    for (yaml, part) in [
        ("name: sokoban", "sokoban"),
        ("{name: bandit, arm: 3}", "arm"),
        ("{name: bandit, arms: []}", "arms"),
        ("{name: bandit, arms: [{low: A, high: a}]}", "arms"),
        ("{name: bandit, arms: [{low: A, high: B, mid: C}]}", "mid"),
        ("{name: bandit, high_probability: 1.5}", "high_probability"),
        ("{name: bandit, low_reward: .nan}", "low_reward"),
        ("{name: frozen_lake, slippery: true}", "slippery"),
        ("{name: frozen_lake, slip: -0.1}", "slip"),
        ("{name: frozen_lake, map: {size: 1}}", "size"),
        ("{name: frozen_lake, map: {size: 101}}", "size"),
        ("{name: frozen_lake, map: {size: 100, frozen: 0}}", "raise frozen"),
        ("{name: frozen_lake, map: {side: 4}}", "expected {size: 4, frozen: 0.8}"),
        ("{name: frozen_lake, map: []}", "map"),
        ("{name: frozen_lake, map: [SF, FGF]}", "map"),
        ("{name: frozen_lake, map: [SX, FG]}", "map"),
        ("{name: frozen_lake, map: [SS, FG]}", "map"),
        ("{name: frozen_lake, map: [SH, HG]}", "a way from S to G"),
        ("{name: countdown, tasks: {count: [4, 3]}}", "count"),
        ("{name: countdown, tasks: {count: [0, 3]}}", "count"),
        ("{name: countdown, tasks: {max_number: 0}}", "max_number"),
        ("{name: countdown, tasks: {count: [16, 16], max_number: 4000000000}}", "max_number"),
        ("{name: countdown, tasks: {target: [9, 1]}}", "target"),
        ("{name: countdown, tasks: {target: [1000, 1001]}}", "target"),
        ("{name: questions}", "path"),
    ] {
        let error = environment(yaml).err().unwrap_or_else(|| panic!("{yaml} was taken"));
        assert!(matches!(error, Error::Config { .. }), "{yaml}: {error:?}");
        assert!(error.to_string().contains(part), "{yaml}: {error}");
    }
}
