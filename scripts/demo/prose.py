# Plain text that is not a story: opinions, diaries, letters, recipes, weather, explanations, lists, poems, dialogues.
from __future__ import annotations

import random
from collections.abc import Callable

from .facts import (
    CAPITALS,
    COLOURS,
    DAYS,
    DEFINITIONS,
    HAIKU_FIVE,
    HAIKU_SEVEN,
    JOKES,
    LEGS,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
    QUESTIONS,
)
from .grammar import Writer
from .stories import new_writer
from .words import BOYS, GIRLS

FAVOURITES = {
    "season": ("{season}", ["because the air smells {adj2}", "because {sky}", "for it is the best time for {hobby}"]),
    "colour": ("{colour}", ["because it makes me {mood}", "like the door of our house", "like {a:thing} I once had"]),
    "food": (
        "{country_food}",
        ["because my {family} makes it so well", "and I could eat it every day", "on a cold day"],
    ),
    "animal": ("the {critter}", ["because it is so {kind}", "although I have never seen one up close"]),
    "day": ("{day}", ["because I have time for {hobby}", "because then we all have {food} together"]),
    "fruit": ("the {fruit}", ["because it is sweet", "and there is one in my bag every day"]),
    "month": ("{month}", ["because it is the month of my birthday", "when {sky}"]),
    "instrument": ("the {instrument}", ["because my {family} plays it", "and I practise every {day}"]),
    "place": ("{spot}", ["because it is so {adj3}", "where I go whenever I feel {mood}"]),
    "hobby": ("{hobby}", ["because it makes me {mood}", "and I have done it for {number} years"]),
    "book": (
        "an old one about {a:job} who goes on a journey",
        ["because it makes me {mood}", "and I read it every {season}"],
    ),
    "person": ("my {family}", ["because nobody is more {kind}", "who taught me {hobby}"]),
}
ADJ2 = ["fresh", "sweet", "of rain", "of leaves", "of smoke", "new"]
ADJ3 = ["quiet", "beautiful", "old", "calm", "bright", "cool in summer"]
ESSAY = [
    "I like {hobby}, and I like {hobby2} even more.",
    "I am not very good at {hobby}, but I enjoy it.",
    "I do not like {hobby}. I have tried it, and I was bored.",
    "I think that {virtue} is more important than money.",
    "I live {where}, and I would not like to live anywhere else.",
    "I have {a:family} who is {a:job}, and a dog called {petname}.",
    "I usually get up at {number} o'clock and have {food}.",
    "I want to be {a:job} one day.",
    "I always carry {a:thing} with me, and I cannot say why.",
    "I believe that everyone should try {hobby} once.",
    "I used to be afraid of {spot}. Now I go there every {day}.",
    "My {family} likes {hobby}, and so do I.",
    "My house is small, but it has a view of {spot}.",
    "My day starts with {food} and ends with a book.",
    "My best friend is called {f}. We have known each other for {timespan}.",
    "My {family} says that I am too {mood}.",
    "We often talk about {hobby}, {f} and I.",
    "On {day} we go to {spot}, and on {day2} we stay at home.",
    "In {season} I like to walk to {spot}.",
    "In the morning I like it quiet. In the evening I like company.",
    "When {sky}, I stay at home and have {food}.",
    "When I am {mood}, I go for a walk.",
    "There is nothing better than {food} on a cold day.",
    "There is {a:adj} {thing} on my desk. It reminds me of {f}.",
    "If I had more time, I would spend it on {hobby}.",
    "If I could go anywhere, I would go to {spot}.",
    "People often ask me why I like {hobby}. The answer is simple: it makes me {mood}.",
    "Perhaps that is all one needs.",
    "Every {season} I promise myself to learn {hobby}, and every year I forget it.",
    "Sometimes I wonder what {f} is doing now.",
    "Life is not always easy, but {virtue} helps.",
    "Today {sky}, and I feel {mood}.",
    "Tomorrow I will visit my {family}.",
    "What I like most about {season} is {hobby}.",
]
DIARY = [
    "{Sky}. I got up late and had {food}.",
    "{Sky} all day. I stayed at home and thought about {hobby}.",
    "Went to {spot} with {f}. {Sight}",
    "The {machine} is broken again. {F} says it will take {timespan}.",
    "Found {a:adj} {thing} in an old {box}. I wonder whose it was.",
    "Nothing happened today, and I enjoyed it.",
    "A letter from my {family} came. Everyone is well.",
    "I spent {timespan} with {hobby}. I am getting better at it.",
    "{F} came for tea. We talked about {virtue} until it was dark.",
    "I felt {mood} today. A walk to {spot} helped.",
    "Made {country_food} with {a:vegetable}. It was quite good.",
    "I saw a {critter} near {spot}. It looked at me and ran away.",
    "Tomorrow I will go to {spot2}, if the weather is good.",
]
NEWS = [
    "The {machine} {whence} has been repaired after {timespan}.",
    "A {critter} was found near {spot} on {day}. It is doing well.",
    "The weather will be {grey} on {day} and {grey} on {day2}.",
    "{F}, {fdesc}, won the great {country_food} contest at {spot}.",
    "A new {job} has come to town. Her name is {owner}.",
    "Somebody lost {a:adj} {thing} near {spot}. Please bring it to the {job2}.",
    "The road to {spot} is closed because of snow.",
    "The people want to build a new bridge near {spot}.",
    "There will be music at {spot} on {day} evening. Everyone is welcome.",
]
BOIL = [
    "First, wash {a:vegetable} and cut it into small pieces.",
    "Heat a little butter in a large pot.",
    "Add {number} cups of water and some salt.",
    "Then add {a:vegetable2} and stir {slowly2}.",
    "Cook everything for {number} minutes.",
    "Add a handful of herbs and a little pepper.",
    "Taste it, and add more salt if you like.",
    "Cover the pot and wait.",
    "Let it rest for {number} minutes before you serve it.",
]
BAKE = [
    "First, mix {number} eggs with a cup of flour and a cup of milk.",
    "Add a little salt and stir {slowly2}.",
    "Let the dough rest for {timespan2}.",
    "Cut {a:vegetable} into small pieces and add it.",
    "Pour everything into a round form.",
    "Put it into a hot oven until it is golden.",
    "Let it cool for {number} minutes.",
]
SERVE = [
    "Serve it with {food}.", "It tastes best with friends.", "Enjoy it while it is hot.",
    "It is even better the next day.",
    "This is enough for {number} people.",
]  # fmt: skip
LETTER = [
    "I hope that you are well. Here {sky}.", "Thank you for the {thing}. It arrived on {day}.",
    "Greetings from {spot}!",
    "We have been here for {timespan}, and I feel {mood}.", "Yesterday we went to {spot}. {Sight}",
    "I miss you very much.",
    "The food is good. Every evening we have {food}.", "Do you still like {hobby}?", "{F} sends you greetings.",
    "I have learned a lot about {hobby}.", "Please write to me soon and tell me about {season} at home.",
    "I am writing to you from {spot2}, and I have much to tell.", "Do you remember the {machine}? It is broken again.",
]  # fmt: skip
CLOSINGS = ["Yours", "With love", "Best wishes", "See you soon", "Your friend", "Greetings"]


def _writer(rng: random.Random) -> Writer:
    writer = new_writer(rng, self_told=True)
    bound = writer.bound
    del bound["hobby"]
    bound |= {"adj2": ADJ2, "adj3": ADJ3, "hobby2": "a quiet evening", "day2": rng.choice(DAYS)}
    bound |= {"slowly2": ["slowly", "well", "gently"], "timespan2": ["ten minutes", "half an hour", "an hour"]}
    bound |= {"whence": "at " + str(bound["spot"])}
    return writer


def favourite(rng: random.Random) -> str:
    writer = _writer(rng)
    parts = []
    for noun in rng.sample(list(FAVOURITES), rng.randint(1, 4)):
        what, reasons = FAVOURITES[noun]
        value, reason = writer.say(what), writer.pick(reasons)
        comma = "," if reason.startswith(("and", "for", "who", "although")) else ""
        form = rng.choice(
            ["My favourite {n} is {v}{c} {r}.", "My favourite {n} is {v}.", "Of all things, I like {v} best{c} {r}."]
        )
        if not parts:
            form = rng.choice(["My favourite {n} is {v}{c} {r}.", "My favourite {n} has always been {v}{c} {r}."])
        parts.append(form.format(n=noun, v=value, c=comma, r=reason))
        if writer.chance(0.5):
            parts.append(writer.pick(ESSAY))
    return " ".join(parts)


def essay(rng: random.Random) -> str:
    writer = _writer(rng)
    return " ".join(writer.pick(ESSAY) for _ in range(rng.randint(3, 8)))


def diary(rng: random.Random) -> str:
    writer = _writer(rng)
    start, count = rng.randrange(7), rng.randint(2, 7)
    days = [
        f"{DAYS[(start + i) % 7]}. {writer.pick(DIARY)}" + (f" {writer.pick(DIARY)}" if writer.chance(0.3) else "")
        for i in range(count)
    ]
    return "\n".join([*(["Dear diary,"] if rng.random() < 0.3 else []), *days])


def letter(rng: random.Random) -> str:
    writer = _writer(rng)
    body = " ".join(writer.pick(LETTER) for _ in range(rng.randint(3, 7)))
    return f"Dear {rng.choice(GIRLS + BOYS)},\n\n{body}\n\n{rng.choice(CLOSINGS)},\n{writer.bound['alias']}"


def news(rng: random.Random) -> str:
    writer = _writer(rng)
    return " ".join(writer.pick(NEWS) for _ in range(rng.randint(2, 4)))


def recipe_steps(rng: random.Random, writer: Writer | None = None) -> list[str]:
    writer = writer or _writer(rng)
    course = rng.choice((BOIL, BOIL, BAKE))
    later = sorted(rng.sample(range(1, len(course)), rng.randint(3, 5)))
    return [writer.say(course[step]) for step in (0, *later)] + [writer.pick(SERVE)]


def recipe(rng: random.Random) -> str:
    writer = _writer(rng)
    heading = writer.pick(["To make a simple {country_food}, you need {a:vegetable} and {a:vegetable2}.",
                           "How to make {country_food}", "Recipe for {vegetable} {country_food}",
                           "You need {a:vegetable}, {a:vegetable2} and a little time."])  # fmt: skip
    return heading + (" " if heading.endswith(".") else "\n\n") + " ".join(recipe_steps(rng, writer))


def haiku(rng: random.Random) -> str:
    first, last = rng.sample(HAIKU_FIVE, 2)
    return f"{first},\n{rng.choice(HAIKU_SEVEN)}.\n{last}."


def explanation(rng: random.Random) -> str:
    """One to four definitions as a paragraph, so that plain prompts such as "A KV cache is" go on well."""
    topics = rng.sample(list(DEFINITIONS), rng.randint(1, 4))
    return " ".join(rng.choice(DEFINITIONS[topic]) for topic in topics)


def _fact(rng: random.Random) -> str:
    kind = rng.randrange(6)
    if kind < 2:
        country, capital = rng.choice(list(CAPITALS.items()))
        return rng.choice([f"The capital of {country} is {capital}.", f"{capital} is the capital of {country}."])
    if kind == 2:
        thing, colour = rng.choice(list(COLOURS.items()))
        return f"{thing[0].upper()}{thing[1:]} is {colour}."
    if kind == 3:
        animal, legs = rng.choice(list(LEGS.items()))
        return f"{animal[0].upper()}{animal[1:]} has {legs} legs."
    if kind == 4:
        word, opposite = rng.choice(list(OPPOSITES.items()))
        return f"The opposite of {word} is {opposite}."
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return rng.choice([f"{a} plus {b} is {a + b}.", f"{a} + {b} = {a + b}", f"{a} times {b} is {a * b}."])


def fact_list(rng: random.Random) -> str:
    return rng.choice([" ", "\n"]).join(_fact(rng) for _ in range(rng.randint(1, 6)))


def sequence(rng: random.Random) -> str:
    """Counting, weekdays, months and letters, from any start."""
    kind = rng.randrange(5)
    if kind == 0:
        start, step = rng.randint(0, 60), rng.choice((1, 1, 1, 2, 5, 10))
        items = [str(start + step * i) for i in range(rng.randint(6, 30))]
    elif kind == 1:
        items = NUMBER_WORDS[rng.randint(0, 2) : rng.randint(8, 21)]
    elif kind == 2:
        start = rng.randrange(7)
        items = [DAYS[(start + i) % 7] for i in range(7)]
    elif kind == 3:
        start = rng.randrange(12)
        items = [MONTHS[(start + i) % 12] for i in range(12)]
    else:
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        items = list(letters if rng.random() < 0.5 else letters.lower())
    return rng.choice([", ", ", ", " ", "\n"]).join(items)


def question_answer(rng: random.Random) -> str:
    asks, answers = rng.choice(QUESTIONS)
    return rng.choice(["Q: {q}\nA: {a}", "Question: {q}\nAnswer: {a}", "{q} {a}"]).format(
        q=rng.choice(asks), a=rng.choice(answers)
    )


def dialogue(rng: random.Random) -> str:
    """A short conversation in plain text, with speakers' names at the beginning of the lines."""
    writer = _writer(rng)
    first, second = rng.sample(GIRLS + BOYS, 2)
    lines = [
        f"{first}: Hello, {second}. How are you?",
        f"{second}: {rng.choice(['I am fine, thank you.', 'Not bad. And you?', 'A little tired.'])}",
    ]
    for _ in range(rng.randint(1, 4)):
        lines.append(f"{first}: " + writer.say("{Question}?"))
        lines.append(f"{second}: " + writer.say("{Answer}. {Remark}."))
    if rng.random() < 0.3:
        ask, answer = rng.choice(JOKES)
        lines += [f"{first}: {ask}", f"{second}: I do not know.", f"{first}: {answer}"]
    lines += [f"{first}: See you on {rng.choice(DAYS)}.", f"{second}: Goodbye, {first}!"]
    return "\n".join(lines)


KINDS: list[tuple[Callable[[random.Random], str], float]] = [
    (favourite, 3), (essay, 4), (diary, 2), (letter, 2), (news, 1.5), (recipe, 2), (haiku, 1), (explanation, 4),
    (fact_list, 2.5), (sequence, 0.6), (question_answer, 1), (dialogue, 1.5),
]  # fmt: skip


def prose(rng: random.Random) -> str:
    composers, weights = zip(*KINDS, strict=True)
    return rng.choices(composers, weights)[0](rng)
